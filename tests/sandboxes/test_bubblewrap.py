"""The bubblewrap sandbox: what a job cannot see, reach or leave behind. The engines' own start in it is tested with verify."""

import json
import sys
import textwrap
import threading
import time
from dataclasses import replace

import psutil
import pytest

from agent import isolation
from agent.config import Config
from agent.errors import UserError
from sandboxes import Limits, SandboxUnavailable, bubblewrap, choose
from sandboxes.bubblewrap import BubblewrapSandbox
from sandboxes.local import LocalSandbox

works = pytest.mark.skipif(bool(bubblewrap.obstacle()), reason=f"bubblewrap: {bubblewrap.obstacle()}")


def start(directory, code, limits=Limits(), environment=None):
    (directory / "steps").mkdir(exist_ok=True)
    (directory / "job.json").write_text("{}")
    return BubblewrapSandbox().start([sys.executable, "-c", textwrap.dedent(code)], directory, environment or {}, limits)


def finish(handle, seconds=30.0):
    deadline = time.monotonic() + seconds
    while (code := handle.poll()) is None:
        assert time.monotonic() < deadline, "the job did not end"
        time.sleep(0.01)
    return code


def run(directory, code, **options):
    """(exit code, log, handle)"""
    handle = start(directory, code, **options)
    return finish(handle), (directory / "log").read_text(), handle


@works
def test_exit_codes_and_signals(tmp_path):
    assert run(tmp_path, "import sys; sys.exit(7)")[0] == 7
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)")[0] == -9


@works
def test_the_file_system_is_private_and_read_only(tmp_path, monkeypatch):
    """Two folders beside the job's: one given, one not. A third of the job's own that the parent writes."""
    job, given, secret = (tmp_path / name for name in ("job", "given", "secret"))
    for folder in (job, given, secret):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    monkeypatch.setenv("SECRET_TOKEN", "must not arrive")
    code = f"""
        import json, os, pathlib
        def can(action, *arguments):
            try:
                action(*arguments)
                return True
            except OSError:
                return False
        job, given, secret = map(pathlib.Path, {[str(job), str(given), str(secret)]!r})
        print(json.dumps(dict(
            reads_given=can((given / "file").read_text), writes_given=can((given / "new").write_text, "x"),
            reads_secret=can((secret / "file").read_text), writes_beside=can((job.parent / "new").write_text, "x"),
            writes_own=can((job / "new").write_text, "x"), writes_step=can((job / "steps" / "0000.json").write_text, "x"),
            replaces_job=can((job / "job.json").write_text, "x"), writes_system=can(pathlib.Path("/usr/new").write_text, "x"),
            reads_shadow=can(pathlib.Path("/etc/shadow").read_text), home=os.listdir(pathlib.Path.home()),
            writes_root=can(pathlib.Path("/new").write_text, "x"), writes_dev=can(pathlib.Path("/dev/new").write_text, "x"),
            token="SECRET_TOKEN" in os.environ, processes=[p for p in os.listdir("/proc") if p.isdigit()])))
        """
    status, log, _ = run(job, code, limits=Limits(readable=(given,)))
    assert status == 0, log
    found = json.loads(log)
    assert found.pop("processes") == ["1", "2"] and found.pop("home") == []
    beside = {"writes_beside"} if tmp_path.is_relative_to("/tmp") else set()  # in the namespace's own /tmp, which is memory
    assert {name for name, yes in found.items() if yes} == {"reads_given", "writes_own", *beside}
    assert not (tmp_path / "new").exists() and (job / "job.json").read_text() == "{}" and (secret / "file").read_text() == "secret"
    assert sorted(p.name for p in job.iterdir()) == ["file", "job.json", "log", "new", "steps"]


@works
def test_no_network_but_loopback_and_shared_memory(tmp_path):
    """vLLM talks to itself over sockets and shared memory."""
    status, log, _ = run(tmp_path, """
        import socket
        from multiprocessing import shared_memory
        listener = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(listener.getsockname(), 2).close()
        shared_memory.SharedMemory(create=True, size=64).unlink()
        path = __import__("tempfile").mkdtemp() + "/s"
        server = socket.socket(socket.AF_UNIX); server.bind(path)
        try:
            socket.create_connection(("192.0.2.1", 80), 2)
        except OSError as error:
            print(error.errno)
        print(sorted(name for _, name in socket.if_nameindex()))
        """)
    assert status == 0, log
    assert log.split("\n")[0] in ("101", "113") and "['lo']" in log


@works
@pytest.mark.parametrize(("code", "limits", "rule"), [
    ("import os, time\nfor _ in range(300):\n    os.fork() or time.sleep(30)\ntime.sleep(30)", Limits(processes=30), "too_many_processes"),
    ("keep = bytearray(400 << 20)\nfor i in range(0, len(keep), 4096): keep[i] = 1\nimport time; time.sleep(30)", Limits(memory_bytes=200 << 20),
     "memory_limit"),
    ("import time\nfor i in range(60):\n    open(f'f{i}', 'wb').write(b'x' * (4 << 20))\ntime.sleep(30)", Limits(disk_bytes=32 << 20), "disk_quota"),
])
def test_limits_end_a_job_by_name(tmp_path, code, limits, rule):
    handle = start(tmp_path, code, limits=replace(limits, wall_seconds=60))
    status = finish(handle, 60)
    assert status == -9 and handle.breach is not None and handle.breach[0] == rule and not handle.timed_out
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


@works
def test_what_outlives_the_job_is_named_and_gone(tmp_path):
    others = set(psutil.Process().children(recursive=True))  # of earlier tests, still on their way out
    status, _, handle = run(tmp_path, """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True, env={})
        """)
    assert status == 0 and len(handle.left) == 1 and "python" in handle.left[0]
    mine = [p for p in psutil.Process().children(recursive=True) if p not in others]
    assert not [p for p in psutil.wait_procs(mine, timeout=5)[1] if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_the_local_sandbox_names_it_too(tmp_path):
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    handle = LocalSandbox().start([sys.executable, "-c", code], tmp_path, {}, Limits())
    assert finish(handle) == 0 and len(handle.left) == (1 if sys.platform == "linux" else 0)


@works
def test_a_killed_job_counts_nothing_as_left(tmp_path):
    handle = start(tmp_path, "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)")
    while "up" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    used = handle.cpu_seconds()
    threads = [threading.Thread(target=handle.kill) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handle.poll() == -9 and handle.left == () and handle.breach is None and used >= 0


@works
def test_wall_clock(tmp_path):
    handle = start(tmp_path, "import time; time.sleep(60)", limits=Limits(wall_seconds=0.5))
    assert finish(handle) == -9 and handle.timed_out and handle.breach is None


def test_the_choice(monkeypatch):
    monkeypatch.delenv(isolation.VARIABLE, raising=False)
    assert isinstance(choose("local"), LocalSandbox)
    assert isinstance(choose("auto"), LocalSandbox if bubblewrap.obstacle() else BubblewrapSandbox)
    assert isinstance(isolation.sandbox("local"), LocalSandbox)
    monkeypatch.setenv(isolation.VARIABLE, "local")
    assert isinstance(isolation.sandbox("auto"), LocalSandbox)
    monkeypatch.setenv(isolation.VARIABLE, "docker")
    with pytest.raises(UserError, match="CONSISTENCY_SANDBOX: unknown sandbox 'docker'; known: auto, bubblewrap, local"):
        isolation.sandbox()
    with pytest.raises(UserError, match="--sandbox: unknown sandbox 'x'"):
        isolation.prefer("x")


def test_a_workspace_remembers_its_choice(tmp_path):
    path = tmp_path / "consistency.toml"
    path.write_text(Config(model="qwen3", scale="tiny", sandbox="local").dumps())
    assert Config.load(path).sandbox == "local"
    path.write_text(Config(model="qwen3", scale="tiny").dumps())
    assert "sandbox" not in path.read_text() and Config.load(path).sandbox == "auto"
    path.write_text('model = "qwen3"\nscale = "tiny"\nsandbox = "docker"\n')
    with pytest.raises(UserError, match="sandbox: Input should be 'auto', 'bubblewrap' or 'local', found 'docker'"):
        Config.load(path)


def test_where_bubblewrap_is_missing_auto_is_local_and_a_wish_is_refused(monkeypatch):
    monkeypatch.delenv(isolation.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    bubblewrap.obstacle.cache_clear()
    try:
        assert isinstance(choose("auto"), LocalSandbox)
        with pytest.raises(SandboxUnavailable, match="bwrap is not installed"):
            choose("bubblewrap")
        with pytest.raises(UserError, match="sandbox bubblewrap cannot be used: bwrap is not installed; `auto` takes the local one"):
            isolation.sandbox("bubblewrap")
    finally:
        bubblewrap.obstacle.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_where_namespaces_are_forbidden_the_trial_says_so(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    bubblewrap.obstacle.cache_clear()
    try:
        assert bubblewrap.obstacle() == "a trial start failed (bwrap: No permissions to create new namespace)"
        assert isinstance(choose(), LocalSandbox)
    finally:
        bubblewrap.obstacle.cache_clear()


def test_what_is_not_guarded_is_said():
    for sandbox in (LocalSandbox(), BubblewrapSandbox()):
        found = sandbox.capabilities()
        assert found.name in ("local", "bubblewrap") and found.not_guarded
    assert "the network" in LocalSandbox().capabilities().not_guarded and not BubblewrapSandbox().capabilities().network
