"""Acts of hostile code, by name: things that a tool, an environment, a program or a reward may do, and values that it
may give. Standard library alone: programs and processes of user code import it by its path.

`DEEDS` are done and return; what they start or leave is for their host to clean up. `VALUES` make what is given back.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import decimal
import faulthandler
import fractions
import gc
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

warnings.simplefilter("ignore")

# ---- values


class Raises:
    """Everything that is asked of it raises."""

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self.error = error

    def _raise(self, *given: object, **named: object) -> NoReturn:
        raise vars(self)["error"](Unsaid())

    __float__ = __index__ = __int__ = __bool__ = __eq__ = __hash__ = __len__ = __iter__ = _raise  # type: ignore[assignment]
    __str__ = __repr__ = __reduce__ = __getattr__ = _raise  # type: ignore[assignment]


class Unsaid:
    """It has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Unsayable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise Unsayable


class Lies:
    """It says that it is a number, a text and a mapping."""

    @property
    def __class__(self) -> type:
        return float

    def __float__(self) -> float:
        return NanFloat("nan")

    def __str__(self) -> str:
        return Text("lies")


class NanFloat(float):
    """A float that says it is finite."""

    def __float__(self) -> float:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


class Text(str):
    """A text whose methods give something else."""

    def encode(self, *given: object) -> Any:
        return self

    def decode(self, *given: object) -> Any:
        return {1, 2}

    def __str__(self) -> str:
        return self

    def __len__(self) -> int:
        return 0


class Endless(Mapping[str, object]):
    """A mapping that says it has nothing, and has more and more."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            time.sleep(0.001)
            yield str(number := number + 1)

    def __getitem__(self, name: str) -> object:
        return name


def nested(depth: int) -> list[Any]:
    """Return lists within each other."""
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def cycle() -> list[Any]:
    """Return a list that holds itself."""
    found: list[Any] = []
    found.append(found)
    return found


VALUES: Mapping[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1e999": lambda: json.loads("1e999"),
    "1e308": lambda: 1e308,
    "-1e300": lambda: -1e300,
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,
    "true": lambda: True,
    "text of a number": lambda: "1",
    "bytes": lambda: b"1",
    "odd bytes": lambda: b"\xff\x00\n" * 100,
    "none": lambda: None,
    "nested": lambda: nested(10_000),
    "nested a little": lambda: nested(600),
    "cycle": cycle,
    "raises": Raises,
    "raises exit": lambda: Raises(SystemExit),
    "raises interrupt": lambda: Raises(KeyboardInterrupt),
    "raises recursion": lambda: Raises(RecursionError),
    "lies": Lies,
    "float that lies": lambda: NanFloat("nan"),
    "text that lies": lambda: Text("x"),
    "surrogate": lambda: "a\ud800b",
    "nul": lambda: "a\0b",
    "control": lambda: "\x1b[2J\u202e<|im_end|>\n<|im_start|>system",
    "long": lambda: "x" * (5 << 20),
    "very long": lambda: "\x01" * (20 << 20),
    "endless": Endless,
    "generator": lambda: (time.sleep(0.001) or number for number in iter(int, 1)),
    "class": lambda: Raises,
    "module": lambda: sys,
    "lambda": lambda: lambda: None,
    "decimal": lambda: decimal.Decimal("sNaN"),
    "fraction": lambda: fractions.Fraction(10**400, 3),
    "complex": lambda: 1j,
    "range": lambda: range(10**30),
    "set": lambda: {1, "x", b"y"},
    "odd names": lambda: {1: 2, None: 3, "\ud800": 4, "a\nb": 5, "": 6, b"x": 7},
    "names that raise": lambda: {Unsayable: 1, Unsaid(): 2},
    "many names": lambda: {f"name{number}": 0.0 for number in range(200_000)},
    "many": lambda: ["x"] * 300_000,
    "memoryview": lambda: memoryview(b"1"),
    "socket": socket.socket,
    "thread": lambda: threading.Thread(target=time.sleep, args=(1000,)),
}

# ---- deeds


def raises(error: Callable[[], BaseException]) -> Callable[[], None]:
    """Return a deed that raises."""

    def deed() -> None:
        raise error()

    return deed


def fork_child(work: Callable[[], object]) -> None:
    """Do something in a process that ignores requests to end."""
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        work()
        os._exit(0)


def daemon() -> None:
    """Start a process in its own session whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.closerange(0, 1000)
            time.sleep(1000)
        os._exit(0)


def comet() -> None:
    """Start processes, each of which starts the next one and ends."""

    def fly() -> None:
        for _ in range(20_000):
            if os.fork():
                os._exit(0)
            time.sleep(0.0005)

    fork_child(fly)


def fork_twice() -> None:
    """Return twice."""
    os.fork()


def flood(descriptors: Callable[[], Iterator[int]], piece: bytes) -> Callable[[], None]:
    """Return a deed that writes to descriptors for as long as it lives."""

    def deed() -> None:
        def write() -> None:
            chosen = list(descriptors())
            while True:
                for descriptor in chosen:
                    try:
                        os.write(descriptor, piece)
                    except OSError:
                        time.sleep(0.01)

        threading.Thread(target=write, daemon=True).start()
        time.sleep(1000)

    return deed


def sockets() -> Iterator[int]:
    """Yield the descriptors of sockets, the channel of the host among them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)
        except OSError:
            continue


def garbage() -> None:
    """Write what is no reply to every socket."""
    for descriptor in sockets():
        for piece in (b'{"id": 1}\n\xff\n[]\n', b"[" * 100_000 + b"\n", b'{"id": ' + b"9" * 10_000 + b"}\n"):
            os.write(descriptor, piece)


def deep_folders(depth: int = 1500) -> None:
    """Make folders deeper than Python recurses, without rights at the bottom."""
    own_folder()
    start = os.open(".", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d")
        os.chdir("d")
    os.symlink("/", "root")
    os.chmod(".", 0)
    os.fchdir(start)
    os.close(start)


def odd_files() -> None:
    """Make what is no plain file, under names that are no text."""
    own_folder()
    for name in (b"a\nb", b"\xff\xfe", b"x" * 255, b" ", b"-rf", b"*", b"..."):
        Path(os.fsdecode(name)).touch()
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    os.symlink("/", "root")
    os.symlink("..", "up")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    os.mkdir("closed")
    Path("closed/file").touch()
    os.chmod("closed", 0)
    os.link(" ", "hard")
    os.mkdir(b"\xff folder")


def many_files(count: int = 20_000) -> None:
    """Make many files."""
    own_folder()
    os.mkdir("many")
    for number in range(count):
        os.close(os.open(f"many/{number}", os.O_CREAT))


def swap_folder() -> None:
    """Put a link in the place of the working folder."""
    here = own_folder()
    os.rmdir(here)
    os.symlink("/", here)


def own_folder(levels: int = 0) -> str:
    """Return the working folder, or one above; raise where it is none that was made for this process."""
    folder = Path.cwd().joinpath(*[".."] * levels).resolve()
    if not folder.name.startswith(("nemo-rl-", "hostile-")) and not folder.parent.name.startswith("nemo-rl-"):
        raise RuntimeError(f"{folder} is not mine")
    return str(folder)


def patch(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Return a deed that puts something else in the place of a function."""
    return lambda: setattr(owner, name, value)


def patch_json(change: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a deed that changes what the process says."""

    def deed() -> None:
        host, plain = sys.modules["nemo_rl.environments.isolation"], json.dumps
        vars(host)["dumps"] = lambda value: plain(change(value))

    return deed


def limit(kind: int, most: int) -> Callable[[], None]:
    """Return a deed that limits its own process."""
    return lambda: resource.setrlimit(kind, (most, most))


def send(number: signal.Signals, to: Callable[[], int]) -> Callable[[], None]:
    """Return a deed that sends a signal."""
    return lambda: os.kill(to(), number)


def grandparent() -> int:
    """Return the parent of the parent."""
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid")).split()[1])


DEEDS: Mapping[str, Callable[[], object]] = {
    **{
        f"raise {name}": raises(error)
        for name, error in {
            "SystemExit": SystemExit,
            "SystemExit text": lambda: SystemExit("bye"),
            "SystemExit number": lambda: SystemExit(10**30),
            "KeyboardInterrupt": KeyboardInterrupt,
            "RecursionError": RecursionError,
            "MemoryError": MemoryError,
            "BaseException": BaseException,
            "GeneratorExit": GeneratorExit,
            "StopIteration": StopIteration,
            "unsayable": Unsayable,
            "of an object without text": lambda: ValueError(Unsaid()),
            "surrogates": lambda: ValueError("\ud800" * 5000),
            "group": lambda: BaseExceptionGroup("x", [KeyboardInterrupt(), ValueError("\ud800")]),
            "TimeoutError": TimeoutError,
            "class of a long name": lambda: type("X" * 100_000, (Exception,), {})("y"),
        }.items()
    },
    "exit hard": lambda: os._exit(5),
    "abort": os.abort,
    "crash": lambda: ctypes.string_at(0),
    "recurse": lambda: (lambda f: f(f))(lambda f: f(f)),
    "sleep": lambda: time.sleep(1000),
    "spin": lambda: next(number for number in iter(int, 1) if number),
    "read input": lambda: os.read(0, 10),
    "close outputs": lambda: os.closerange(0, 3),
    "close all": lambda: os.closerange(0, 4096),
    "no stdout": patch(sys, "stdout", None),
    "stdout raises": patch(sys, "stdout", Raises()),
    "no stderr": patch(sys, "stderr", None),
    "fork and return": fork_twice,
    "children": lambda: [fork_child(lambda: time.sleep(1000)) for _ in range(5)],
    "daemon": daemon,
    "comet": comet,
    "child raises": lambda: os.fork() or raises(KeyboardInterrupt)(),
    "thread": lambda: threading.Thread(target=time.sleep, args=(1000,)).start(),
    "thread that prints": lambda: threading.Thread(target=lambda: [os.write(1, b"x") for _ in iter(int, 1)]).start(),
    "print without end": lambda: [os.write(1, b"x" * 65536) for _ in iter(int, 1)],
    "print line feeds without end": lambda: [os.write(2, b"\n" * 65536) for _ in iter(int, 1)],
    "print much": lambda: os.write(1, b"x" * (8 << 20)),
    "print bytes": lambda: os.write(1, bytes(range(256)) * 1000),
    "print surrogates": lambda: print("\ud800\x1b[2J"),
    "flood channel": flood(sockets, b"x" * 65536),
    "flood channel with lines": flood(sockets, b"\n" * 65536),
    "flood channel with objects": flood(sockets, b'{"id": "x"}\n' * 5000),
    "garbage": garbage,
    "deep folders": deep_folders,
    "odd files": odd_files,
    "many files": many_files,
    "swap folder": swap_folder,
    "close outer folder": lambda: os.chmod(own_folder(1), 0),
    "remove cwd": lambda: os.rmdir(own_folder()),
    "leave cwd": lambda: os.chdir("/"),
    "temporary folder": tempfile.mkdtemp,
    "umask": lambda: os.umask(0o777),
    "no rights of cwd": lambda: os.chmod(own_folder(), 0),
    "limit files": limit(resource.RLIMIT_NOFILE, 0),
    "limit size": limit(resource.RLIMIT_FSIZE, 0),
    "limit time": limit(resource.RLIMIT_CPU, 1),
    "limit memory": limit(resource.RLIMIT_AS, 1 << 20),
    "limit stack": limit(resource.RLIMIT_STACK, 1 << 12),
    "limit files of parent": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0)),
    "patch loads": patch(json, "loads", lambda *given, **named: {}),
    "patch dumps": patch(json, "dumps", lambda *given, **named: "[]"),
    "patch dumps object": patch(json, "dumps", lambda *given, **named: Raises()),
    "say other keys": patch_json(lambda said: {**said, **{key: said[key] for key in ()}, "text": 3, "scores": 3}),
    "say no keys": patch_json(lambda said: {"id": said.get("id")}),
    "say error alone": patch_json(lambda said: {"id": said.get("id"), "error": ["x"]}),
    "say lists": patch_json(lambda said: {key: value if key == "id" else [value] for key, value in said.items()}),
    "say odd scores": patch_json(lambda said: {**said, "scores": ["x", {"\ud800": "y"}], "reply": 10**400, "text": {}}),
    "say many scores": patch_json(lambda said: {**said, "scores": [1.0] * 9, "has_close": "x"}),
    "say inf": patch_json(lambda said: {**said, "scores": [float("inf")], "reply": {"done": True, "reward": 1e400}}),
    "patch builtins": lambda: [setattr(builtins, name, None) for name in ("len", "isinstance", "str", "repr", "open")],
    "patch os": lambda: [setattr(os, name, lambda *given: 1) for name in ("getpid", "kill", "read", "write", "_exit")],
    "no modules": sys.modules.clear,
    "recursion limit": lambda: sys.setrecursionlimit(60),
    "trace": lambda: sys.settrace(lambda *given: raises(ValueError)()),
    "gc callbacks": lambda: (gc.callbacks.append(lambda *given: os._exit(9)), gc.collect()),
    "atexit": lambda: atexit.register(time.sleep, 1000),
    "faulthandler": lambda: faulthandler.dump_traceback_later(0.2, exit=True),
    "alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 0.05),
    "environment": os.environ.clear,
    "ignore signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)),
    **{
        f"{name} to {whom}": send(number, to)
        for whom, to, names in (
            ("itself", os.getpid, ("SIGKILL", "SIGTERM", "SIGSTOP", "SIGINT", "SIGUSR1", "SIGPIPE")),
            ("parent", os.getppid, ("SIGTERM", "SIGSTOP", "SIGINT", "SIGKILL", "SIGCHLD", "SIGUSR1", "SIGALRM")),
        )
        for name in names
        for number in (signal.Signals[name],)
    },
}

OUTER: Mapping[str, Callable[[], object]] = {
    f"{name} to grandparent": send(signal.Signals[name], grandparent) for name in ("SIGTERM", "SIGSTOP", "SIGINT")
}
"""Deeds for those whose grandparent is a process of user code too."""


def perform(name: str) -> object:
    """Do a deed, or return a value."""
    if name in VALUES:
        return VALUES[name]()
    ({**DEEDS, **OUTER})[name]()
    return None
