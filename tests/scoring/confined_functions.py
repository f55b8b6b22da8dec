"""What the workers of test_confinement run."""

import ctypes
import os
import socket


def create(path):
    open(path + ".new", "w").close()


def overwrite(path):
    with open(path, "w") as file:
        file.write("changed")


def append(path):
    with open(path, "a") as file:
        file.write("changed")


def delete(path):
    os.unlink(path)


def rename(path):
    os.rename(path, path + ".moved")


def link(path):
    os.symlink("/", path + ".link")


def use_own_folder():
    with open("here", "w") as file, open(os.devnull, "w") as nowhere:
        file.write("written")
        nowhere.write("lost")
    with open("here") as file:
        return file.read()


def connect(port):
    socket.create_connection(("127.0.0.1", port), timeout=60).close()
    return "connected"


def signal_process(pid):
    os.kill(pid, 0)
    return "sent"


def landlock_version():
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
