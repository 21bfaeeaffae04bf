"""The local sandbox: what a job sees, what stops it, and that nothing is left of it."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from sandboxes import Limits
from sandboxes.local import LocalSandbox


def start(directory, code, environment=None, limits=Limits()):
    return LocalSandbox().start([sys.executable, "-c", textwrap.dedent(code)], directory, environment or {}, limits)


def finish(handle, seconds=10.0):
    deadline = time.monotonic() + seconds
    while (code := handle.poll()) is None:
        assert time.monotonic() < deadline, "the job did not end"
        time.sleep(0.01)
    return code


def wait_for(path, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.01)
    return path.read_text()


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_output_and_exit_code(tmp_path):
    handle = start(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert finish(handle) == 7
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_a_signal_is_a_negative_exit_code(tmp_path):
    assert finish(start(tmp_path, "import os; os.kill(os.getpid(), 9)")) == -9


def test_the_environment_is_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "must not arrive")
    finish(start(tmp_path, "import os, json; print(json.dumps(dict(os.environ)))", {"GIVEN": "1"}))
    seen = json.loads((tmp_path / "log").read_text())
    assert "SECRET_TOKEN" not in seen
    assert seen["GIVEN"] == "1"
    assert seen["HOME"] == str(tmp_path / "home") and seen["TMPDIR"] == str(tmp_path / "tmp")


def test_the_project_imports_but_not_files_of_the_job_folder(tmp_path):
    (tmp_path / "consistency.py").write_text("raise SystemExit('shadowed')")
    code = "import consistency.contract, os; print(os.getcwd())"
    assert finish(start(tmp_path, code)) == 0
    assert (tmp_path / "log").read_text().strip() == str(tmp_path)


def test_limits(tmp_path):
    handle = start(tmp_path, """
        import resource
        print(resource.getrlimit(resource.RLIMIT_CORE)[1], resource.getrlimit(resource.RLIMIT_NOFILE)[1], flush=True)
        open('big', 'wb').write(b'x' * 3000000)
        """, limits=Limits(file_bytes=1 << 20, open_files=64))
    assert finish(handle) != 0
    log = (tmp_path / "log").read_text()
    assert log.startswith("0 64")
    assert "File too large" in log
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def test_wall_clock_ends_a_job_that_nobody_polls(tmp_path):
    handle = start(tmp_path, "import time; time.sleep(60)", limits=Limits(wall_seconds=0.3))
    deadline = time.monotonic() + 10
    while alive(handle.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert handle.poll() == -9
    assert handle.timed_out


GRANDCHILD = """
    import pathlib, subprocess, sys, time
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session={new_session})
    pathlib.Path('draft').write_text(str(child.pid)); pathlib.Path('draft').rename('pid')
    {then}
    """


@pytest.mark.parametrize("new_session", [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"))])
@pytest.mark.parametrize("then", ["time.sleep(60)", "pass"])
def test_no_grandchild_survives(tmp_path, new_session, then):
    handle = start(tmp_path, GRANDCHILD.format(new_session=new_session, then=then))
    grandchild = int(wait_for(tmp_path / "pid"))
    if then == "pass":
        assert finish(handle) == 0
    else:
        assert alive(grandchild)
        handle.kill()
        assert handle.poll() == -9
    assert not alive(grandchild)
    assert not alive(handle.pid)


def test_scratch_folders_go_with_the_job(tmp_path):
    finish(start(tmp_path, "import os, pathlib; pathlib.Path(os.environ['HOME'], 'cache').write_text('x')"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]


def test_kill_is_idempotent_and_spares_others(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    victim, bystander = start(first, "import time; time.sleep(60)"), start(second, "import time; time.sleep(60)")
    victim.kill()
    victim.kill()
    assert victim.poll() == -9 and bystander.poll() is None
    bystander.kill()


def test_an_unclosed_job_dies_with_its_owner(tmp_path):
    owner = textwrap.dedent(f"""
        import pathlib, sys
        from sandboxes import Limits
        from sandboxes.local import LocalSandbox
        handle = LocalSandbox().start([sys.executable, '-c', 'import time; time.sleep(60)'], pathlib.Path({str(tmp_path)!r}), {{}}, Limits())
        print(handle.pid)
        """)
    done = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert not alive(int(done.stdout))


def test_a_missing_command_is_reported(tmp_path):
    handle = LocalSandbox().start(["/no/such/program"], tmp_path, {}, Limits())
    assert finish(handle) != 0
    assert "/no/such/program: No such file" in (tmp_path / "log").read_text()
