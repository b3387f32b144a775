"""Many threads, forked and spawned processes, the end of the interpreter, and interpreters within one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import low

import lite_ext

F32 = torch.float32
THREADS = 64


def test_many_threads_and_changing_containers(backend: Any) -> None:
    """Readers of what others change get a result that was right at some moment, or an error that says so."""
    still: dict[str, Any] = {"a": [low() for _ in range(30)], "b": {"c": (low(), torch.ones(9000).half())}}
    moving: dict[Any, Any] = {"list": [low() for _ in range(30)], "dict": {at: low() for at in range(30)}}
    wrong: list[Any] = []
    start = threading.Barrier(THREADS)

    def change(rounds: int) -> None:
        for _ in range(rounds):
            moving["list"].append(low())
            moving["dict"][object()] = [low()]
            moving["list"].pop(0)
            moving["dict"].popitem()

    def work(number: int) -> None:
        start.wait()
        if number % 8 == 0:
            change(200)
            return
        for _ in range(20):
            result = lite_ext.convert(still, F32)
            if [leaf.dtype for leaf in (*result["a"], *result["b"]["c"])] != [F32] * 32:
                wrong.append("a shared tree was not converted")
            try:
                lite_ext.convert(moving, F32)
            except (RuntimeError, TypeError) as error:
                if not str(error).startswith("convert: "):
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(leaf.dtype == torch.bfloat16 for leaf in still["a"])


def _run(code: str, timeout: float = 120) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=environment,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert not done.stderr
    return done.stdout.strip()


CHILD = """
import multiprocessing, os, torch, lite_ext
torch.set_num_threads(2)
def work(number):
    tree = {"a": [torch.full((3,), float(number), dtype=torch.bfloat16) for _ in range(50)], "b": torch.ones(200_000).half()}
    out = lite_ext.convert(tree, torch.float32)
    return all(leaf.dtype == torch.float32 and bool((leaf == number).all()) for leaf in out["a"]) and bool(out["b"].sum() == 200_000)
if __name__ == "__main__":
    assert work(1)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_after_use(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # With one thread: torch's own pool of threads does not survive a fork.
    threads = "torch.set_num_threads(1)" if method == "fork" else ""
    script.write_text(
        CHILD.replace("torch.set_num_threads(2)", threads)
        + f"""
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        assert all(pool.map(work, range(6)))
    assert work(7)
    print("done")
"""
    )
    assert _run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')") == "done"


@pytest.mark.parametrize(
    "use",
    [
        "import atexit; atexit.register(lambda: print(lite_ext.convert([t], torch.float32)[0].dtype))",
        "import weakref; class_ = type('C', (), {'__del__': lambda self: print(convert([t], F32)[0].dtype)}); held = class_()",
        "import sys; sys.held = lite_ext.convert([t.clone().requires_grad_()], torch.float32); print('torch.float32')",
        "import threading; threading.Thread(target=lambda: [time.sleep(0.2), print(convert([t], F32)[0].dtype)]).start()",
    ],
    ids=["atexit", "destructor", "kept alive", "thread"],
)
def test_at_the_end_of_the_interpreter(use: str) -> None:
    assert (
        _run(
            f"import time, torch, lite_ext\nfrom lite_ext import convert\nF32 = torch.float32\nt = torch.ones(2).half()\n{use}"
        )
        == "torch.float32"
    )


SUBINTERPRETER = """
import lite_ext  # in the main interpreter first
import importlib, sys
interpreters = importlib.import_module("_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters")
made = interpreters.create()
code = '''
try:
    import lite_ext
except ImportError as error:
    print("refused:", error)
'''
sys.exit(interpreters.run_string(made, code))
"""


def test_interpreters_within_the_interpreter_are_refused() -> None:
    assert _run(SUBINTERPRETER).startswith("refused:")
