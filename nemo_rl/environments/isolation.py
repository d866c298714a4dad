"""The child side of processes that run user code: a guard, limits, and the loading of a target by name.

Used by the processes of rewards (`session_rewards`) and of environments and tools (`zygote_child`); standard library
only, so that they start at once. A guard is the parent of everything that user code starts: it ends all of it when its
owner asks for it or dies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib
import importlib.util
import inspect
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from json import dumps, loads
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from nemo_rl.utils.exits import text_of
from nemo_rl.utils.process_guard import LIBC, die_with_parent, leave_notices_to_driver, remove_folder

__all__ = [
    "CHANNEL_CLOSED_CODE",
    "Lines",
    "NetworkState",
    "become_subreaper",
    "children_of",
    "cut",
    "digest_of",
    "kill_descendants",
    "limit_memory",
    "load_target",
    "main",
    "out_of_reach",
    "places_of",
    "serve",
    "start_guarded",
    "turn_network_off",
]

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40
CHANNEL_CLOSED_CODE = 74
"""Exit code (EX_IOERR) of a process that cannot send a reply, since user code has closed its descriptors."""
_CHANNEL_FROM = 500
"""Lowest number of a channel's descriptor: beyond what a program opens or closes by the dozen."""
_TEXT_LIMIT = 2000
"""Characters of an error's text."""
_FRAMES_SHOWN = 5
_REMOVALS, _REMOVAL_PAUSE_S = 50, 0.1
"""Most tries to remove a folder whose guard was killed, and the seconds between them."""
_NETWORK_CALLS = ("connect", "bind", "sendto", "sendmsg")
_NAME_LOOKUPS = ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo")
"""Audit events of the module `socket`; a look-up of a name sends it to a server."""

NetworkState = Literal["on", "namespace", "audit_hook"]
"""`namespace`: no program of the process reaches any network; `audit_hook`: no Python code of the process does."""


# ---- the guard


def start_guarded(parent: int, *, folder: str | None = None) -> None:
    """Fork: return in the new process, whose parent is a guard; the guard never returns.

    The guard exits with the code of the new process once it has killed what that has left. Both end with the thread
    that started the guard.

    Args:
        parent: the process that started this one.
        folder: removed when everything has ended.
    """
    leave_notices_to_driver()
    remover, write_end = _start_remover(folder) if folder is not None else (0, -1)
    become_subreaper()

    def end_everything(code: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asked twice, it would leave before its remover
        kill_descendants(spared=remover)
        if remover:
            os.close(write_end)
            with suppress(ChildProcessError):
                os.waitpid(remover, 0)
        os._exit(code)

    signal.signal(signal.SIGTERM, lambda number, frame: end_everything(128 + number))
    die_with_parent(parent, signal.SIGTERM)
    # Ctrl-C reaches the whole foreground group; the parent decides when the work ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = os.getpid()
    guarded = os.fork()
    if guarded:
        # What the guarded process shares with its owner must close with it.
        os.closerange(3, max(write_end, 3))
        os.closerange(max(write_end + 1, 3), os.sysconf("SC_OPEN_MAX"))
        while True:
            ended, status = os.wait()
            if ended == guarded:
                code = os.waitstatus_to_exitcode(status)
                end_everything(code if code >= 0 else 128 - code)
    if remover:
        os.close(write_end)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(guard)


def _start_remover(folder: str) -> tuple[int, int]:
    """Fork a process that removes the folder once this one has ended, also by SIGKILL, as Ray ends the children of its
    workers; return its id and the descriptor whose closing tells it."""
    told, write_end = os.pipe()
    if remover := os.fork():
        os.close(told)
        return remover, write_end
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        os.closerange(3, told)
        os.closerange(told + 1, os.sysconf("SC_OPEN_MAX"))
        os.read(told, 1)
        for _ in range(_REMOVALS):  # what user code has started may live for a moment longer
            remove_folder(folder)
            if not os.path.lexists(folder):
                break
            time.sleep(_REMOVAL_PAUSE_S)
    finally:
        os._exit(0)


def become_subreaper() -> None:
    """Make orphans among the descendants of this process its children."""
    LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(*, spared: int = 0) -> None:
    """Kill all descendants of a subreaper but one child. Orphans become its children, so killing children until there
    are none reaches every one."""
    while children := set(children_of(os.getpid())) - {spared}:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def children_of(parent: int) -> list[int]:
    """Return the children of a process that has one thread."""
    try:
        with open(f"/proc/{parent}/task/{parent}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return _children_by_search(parent)  # a kernel without CONFIG_PROC_CHILDREN


def _children_by_search(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # pid (name) state parent ...; the name may hold anything, the last bracket ends it.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(name))
    return found


def main() -> None:
    """Run a program under a guard: the arguments are PARENT_PID FOLDER MEMORY_MIB COMMAND.., memory 0 for no limit.

    The program runs in the folder, which is removed when it and all that it started have ended.
    """
    parent, folder, mib, *command = sys.argv[1:]
    start_guarded(int(parent), folder=folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(folder)
    limit_memory(int(mib) or None)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


# ---- messages


class Lines:
    """Puts lines together of what comes in pieces.

    Args:
        limit_bytes: most bytes of a line: more come from something else that writes there.
    """

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self._rest, self._limit_bytes = bytearray(), limit_bytes

    def add(self, piece: bytes) -> list[bytes]:
        """Return the lines that are whole now.

        Raises:
            OSError: one is longer than the limit.
        """
        first, *others = piece.split(b"\n")
        self._rest += first
        if len(self._rest) > self._limit_bytes:
            raise OSError(errno.EMSGSIZE, f"more than {self._limit_bytes} bytes came where a reply was expected")
        if not others:
            return []
        lines = [bytes(self._rest), *others[:-1]]
        self._rest = bytearray(others[-1])
        return lines


def serve(fd: int, answer: Callable[[dict[str, Any]], Mapping[str, object]], *, besides: str) -> None:
    """Answer requests, a JSON object per line, until the owner closes the socket; does not return.

    Args:
        besides: file whose frames are not shown where user code raised.
    """
    own = os.getpid()
    with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as stream:
        for line in stream:
            request = loads(line)
            try:
                said = dumps({"id": request["id"], **answer(request)})
            except SystemExit as error:
                with suppress(Exception):
                    if not isinstance(error.code, int | None):
                        sys.stderr.write(f"{error.code}\n")
                    sys.stdout.flush()
                os._exit(error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None))
            except BaseException as error:  # noqa: BLE001 - user code; the owner reports it
                said = dumps({"id": request["id"], **_told(error, besides=besides)})
            if os.getpid() != own:
                with suppress(Exception):
                    sys.stderr.write("a process that user code forked has returned from its call and was ended\n")
                os._exit(0)
            # Prints must have left before the reply, so that they are reported with the right step.
            with suppress(Exception):  # user code may have put anything in its place
                sys.stdout.flush()
            # The line feed before it ends whatever else was written there.
            try:
                stream.write(b"\n" + said.encode() + b"\n")
                stream.flush()
            except OSError:
                os._exit(CHANNEL_CLOSED_CODE)
    os._exit(0)


def _told(error: BaseException, *, besides: str) -> dict[str, str]:
    """Return what the owner is told of an error of user code, whose class may be anything."""
    kind = cut(type(error).__name__)
    try:
        places = places_of(error, besides=besides)
    except Exception as second:  # noqa: BLE001 - user code has changed what finds them
        places = f"\n  (no places: {type(second).__name__})"
    return {"error": cut(f"{kind}: {text_of(error)}"), "places": places, "kind": kind}


# ---- limits


def out_of_reach(fd: int) -> int:
    """Move a descriptor to a high number that programs started by user code do not inherit; return the number."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _CHANNEL_FROM)
    os.close(fd)
    return moved


def limit_memory(mib: int | None) -> None:
    """Limit the address space of this process and of its children, and turn core dumps off."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mib is not None:
        resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))


def turn_network_off() -> NetworkState:
    """Take the network from this process and all that it starts, as well as the kernel lets it.

    `namespace`: its own network namespace that has nothing but a loopback interface; services of this machine are
    out of reach too. Needs root, or user namespaces. `audit_hook`, elsewhere: Python refuses to connect, bind or send
    by sockets other than AF_UNIX and to look up names in this process and its forks; other programs that they run are
    not hindered. Neither is a wall against code that wants to break out.
    """
    if LIBC.unshare(_CLONE_NEWNET) == 0 or _unshare_as_user():
        _start_loopback()
        return "namespace"
    sys.addaudithook(_refuse_network)
    return "audit_hook"


def _unshare_as_user() -> bool:
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            Path("/proc/self", name).write_text(text)
        except OSError:
            continue  # the process then has the identity of nobody, still without a network
    return True


def _start_loopback() -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
    except OSError:
        return  # user code then has no loopback either


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    module, _, call = event.partition(".")
    if module != "socket":
        return
    if call in _NAME_LOOKUPS or (call in _NETWORK_CALLS and arguments[0].family != socket.AF_UNIX):
        raise PermissionError(errno.EACCES, "the network is off for this process")


# ---- loading of user code


def load_target(target: str) -> tuple[ModuleType, Any]:
    """Return the module and the object of `module:name` or `FILE.py:name`."""
    place, _, name = target.rpartition(":")
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module_named(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return module, found


def _module_named(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        places = ", ".join(path for path in sys.path if path)
        raise ModuleNotFoundError(
            f"no module named {error.name!r}: it is neither beside the recipe that names it, nor in the working "
            f"directory {os.getcwd()}, nor in {places}; FILE.py:function names a file"
        ) from error


def _module_of_file(file: Path) -> ModuleType:
    """Return the module of a file: by its name in a package where it is a part of one, else by itself.

    Either way it can import what lies beside it.
    """
    file = file.resolve(strict=True)
    folder, names = file.parent, [file.stem] if file.stem != "__init__" else []
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    if names and names != [file.stem]:
        return importlib.import_module(".".join(names))
    # A name that hides no module that is imported already, such as that of a file json.py.
    name = file.stem if file.stem not in sys.modules else f"reward_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def digest_of(module: ModuleType, found: Any) -> str:
    """Return a digest of the sources of a module and an object, and of imported modules that lie beside either."""
    named = [module, inspect.getmodule(inspect.unwrap(found)) or module]
    files = {Path(str(vars(one)["__file__"])) for one in named if vars(one).get("__file__")}
    folders = {file.parent for file in files}
    for other in list(sys.modules.values()):
        file = vars(other).get("__file__") if isinstance(other, ModuleType) else None
        if isinstance(file, str) and Path(file).parent in folders:
            files.add(Path(file))
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(files, key=lambda file: file.name):
        if path.is_file():
            digest.update(f"{path.name}\n".encode() + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def places_of(error: BaseException, *, besides: str) -> str:
    """Return the places where user code raised, innermost last, without frames of the file `besides`."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in (besides, __file__)]
    return "".join(f"\n  at: {frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-_FRAMES_SHOWN:])


def cut(text: str) -> str:
    """Return the beginning of a text, as much as an error shows."""
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]} ..."
