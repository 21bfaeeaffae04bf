import json

from bench.mcp import PAGE, RESULT, fill, table


def test_the_page_shows_what_the_result_holds():
    page, result = PAGE.read_text(encoding="utf-8"), json.loads(RESULT.read_text(encoding="utf-8"))
    assert fill(page, result) == page and table(result) in page, "run python -m bench.mcp on an idle machine"


def test_every_figure_comes_from_the_file():
    times = {"median": 0.41, "least": 0.4, "longest": 0.52, "starts": 6, "p95": 13.3}
    result = {"command": "python -m bench.mcp", "date": "2026-01-02 03:04 UTC", "versions": {"mcp": "2.3.0"},
              "hardware": {"processor": "A CPU", "cores": 2, "load before": 0.3}, "figures": {
                  "start to tool list, s": times, "start to tool list, nothing on record, s": 1.8, "start to the answer of a first call, s": times,
                  "a process that imports, s": {"python": 0.04, "mcp": 1.5}, "idle memory, MiB": 88.1,
                  "status call, 50 clients once a second, ms": {**times, "median": 7.6},
                  "cancel a command, its child and its grandchild that ignore SIGTERM, ms": {**times, "median": 436.6}}}
    shown = table(result)
    for part in ("0.41 s (longest of 6: 0.52 s)", "| 1.8 s |", "| 88.1 MiB |", "7.6 ms in the median, 13.3 ms in 95 of 100", "| 0.44 s |",
                 "python 0.04 s, mcp 1.5 s", "A CPU, 2 cores, load 0.3 before; mcp 2.3.0; 2026-01-02 03:04 UTC"):
        assert part in shown
    page = "a\n<!-- results:mcp -->\nold\n<!-- end -->\nb\n"
    assert fill(page, result) == f"a\n<!-- results:mcp -->\n{shown}<!-- end -->\nb\n"
    assert "Not measured" in table({**result, "figures": {}})
