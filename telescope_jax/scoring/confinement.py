"""Takes from this process what no grader needs: files outside one folder, the network, signals.

A grader that evaluates an answer does what the answer says. Linux's Landlock (since 5.13; network
since 6.7, signals since 6.12) lets a process forbid itself these things for good, without rights of
its own and for all that it starts. Reading stays allowed: graders import what they need late.

For `reward_worker`'s children; standard library only, as there.
"""

import ctypes
import os
import struct
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, on every architecture
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

# Bits of linux/landlock.h: write, remove (2), make (7 kinds); refer since version 2, truncate 3.
_WRITE = 1 << 1
_CHANGE_FILES = _WRITE | sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_TCP = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def landlock_version() -> int:
    """Of the running kernel; 0 where there is none (another system, or one built without it)."""
    if sys.platform != "linux":
        return 0
    size, system = ctypes.c_size_t(0), ctypes.CDLL(None, use_errno=True)
    return max(0, system.syscall(_CREATE_RULESET, None, size, _VERSION_FLAG))


def confine(folder: str) -> bool:
    """From here on this process changes files in `folder` alone, opens no TCP connection, and
    signals nobody but its own children; each as far as the kernel can.

    Returns:
      False where there is no Landlock, or it refuses.
    """
    version = landlock_version()
    if version < 1:
        return False
    system = ctypes.CDLL(None, use_errno=True)
    files = _CHANGE_FILES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    asked = struct.pack("=Q", files)
    if version >= 4:
        asked += struct.pack("=Q", _TCP)
    if version >= 6:
        asked += struct.pack("=Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = system.syscall(_CREATE_RULESET, asked, ctypes.c_size_t(len(asked)), ctypes.c_uint32(0))
    if rules < 0:
        return False
    try:
        for path, rights in ((folder, files), (os.devnull, files & (_WRITE | _TRUNCATE))):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", rights, descriptor)
            failed = system.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, ctypes.c_uint32(0))
            os.close(descriptor)
            if failed:
                return False
        system.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # without it the next call is refused
        return system.syscall(_RESTRICT_SELF, rules, ctypes.c_uint32(0)) == 0
    finally:
        os.close(rules)
