"""What the workers of test_reward_pool run: ordinary, slow, greedy and hostile functions."""

import os
import signal
import sys
import time

patched = False


def add(a, b):
    return a + b


def hang(started_file=None):
    if started_file:
        with open(started_file, "w") as file:
            file.write(str(os.getpid()))
    while True:
        time.sleep(1)


def spin():
    while True:
        pass


def count_and_hang(path):
    with open(path, "a") as file:
        file.write("x")
    hang()


def hang_once(path):
    if os.path.exists(path):
        return 1.0
    with open(path, "w"):
        pass
    hang()


def eat_memory():
    kept = []
    while True:
        kept.append(bytearray(1 << 24))


def fail(message):
    raise KeyError(message)


def leave():
    sys.exit(3)


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def kill_worker():
    os.kill(os.getppid(), signal.SIGKILL)
    hang()


def stop_worker():
    os.kill(os.getppid(), signal.SIGSTOP)
    hang()


def patch():
    global patched
    was, patched = patched, True
    return was


def surroundings():
    with open("left_behind", "w") as file:
        file.write("x")
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    targets = [os.path.realpath(f"/proc/self/fd/{number}") for number in descriptors]
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": os.listdir(),
        "descriptors": targets,
        "modules": sorted(sys.modules),
    }


def chatter():
    print('{"id": 1, "value": "forged"}', flush=True)
    os.write(1, b'{"id": 1, "value": "forged"}\n')
    return "true value"


def large(count):
    return "x" * count


def not_json():
    return {1, 2}


def not_finite():
    return float("nan")


made = 0


def make(base):
    global made
    made += 1
    return {"base": base, "made": made}


def use(shared, value):
    shared["base"] += 1000  # in this call's process only
    return [shared["base"] + value, shared["made"]]


def fork_and_return():
    """Both processes return; the copy first."""
    if child := os.fork():
        os.waitpid(child, 0)
    return "the call" if child else "its copy"


def spawn_and_hang(path):
    if os.fork() == 0:
        with open(path, "w") as file:
            file.write(str(os.getpid()))
        hang()
    hang()
