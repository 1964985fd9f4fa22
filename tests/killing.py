"""How tests kill what they test: in a child, after some time or at a certain call.

Importing torch takes seconds, so a test file is a program, too: started once (`run_program`), it imports everything,
forks a child for each attempt, and prints what it saw, which the tests then judge.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


HANGS = 3600
"""Seconds after which a program hangs, on however slow a machine."""


def run_program(file: str, folder: Path, kind: str) -> Any:
    """Run a test file with a folder and a kind of kills, and return what it prints.

    It may import what lies beside it and here, and what this process imports.
    """
    places = os.pathsep.join(filter(None, [str(HERE), str(Path(file).parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, file, str(folder), kind]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fork(attempt: Callable[[], object], kill_after: float | None = None) -> bool:
    """Runs it in a child; whether that was killed.  Anything but a kill or a clean end is an error."""
    child = os.fork()
    if child == 0:
        try:
            attempt()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "it failed by itself"
    return False


def die_at(owner: Any, name: str, number: int, *, after: bool = False) -> None:
    """From now on, this process is killed right before or after the `number`th call of that function."""
    original, left = getattr(owner, name), [number]

    def counting(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counting)


def signals_of_a_terminal() -> None:
    """As `preexec_fn`: no signal is ignored in the new process, also where the tests run under nohup."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
