"""Threads of a server's processes get Python soon after they ask for it."""

import subprocess
import sys

SCRIPT = """
import threading, time
from ridgeline.server.short_turns import take_short_turns

def work_beside_asking():
    count, is_over = 0, False

    def work():
        nonlocal count
        while not is_over:
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(60):
        time.sleep(0)  # gives Python up, and asks for it again
    is_over = True
    thread.join()
    return count

before = work_beside_asking()
take_short_turns()
print(before, work_beside_asking())
"""


def test_others_work_less_while_a_thread_asks() -> None:
    """Counted in work, not in time: a tenth, where the thread that works has a core."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert after < before / 2
