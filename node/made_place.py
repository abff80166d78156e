"""A folder that goes away with the process that made it, however that ends.

    keeper = take(Path("runs/rehearsal/made"), need=82.0, flag="--out")
    ...
    keeper.communicate(b"\n")            # now it is removed; so it is when this process is killed

The keeper is this file as a process of its own. It removes the folder when it is told a line, and when its
standard input ends, as it does with the process that took the folder. It holds a lock on the folder's marker
meanwhile. What is left where keepers are killed, too (a machine that loses its power), has a marker without a
lock: the next take() removes it.

No torch here: the keeper imports this file only. GB is 1e9 bytes.
"""

import fcntl
import shutil
import signal
import subprocess
import sys
from pathlib import Path

MARKER = ".made_up"  # whoever finds it in a folder may delete the folder


def take(where: Path, need: float, flag: str) -> subprocess.Popen:
    """Make the folder `where`, for `need` GB. Returns its keeper.

    Raises ValueError, naming `flag`, when it exists and was not made here, when another run uses it, and when
    its disk has too little room.
    """
    elsewhere = f"give another place with {flag}"
    if where.is_symlink() or where.exists():
        if where.is_symlink() or not (where / MARKER).is_file():
            raise ValueError(f"{where} exists and holds no {MARKER}: it was not made here and is left alone; "
                             f"{elsewhere}")
        with open(where / MARKER) as old:
            try:
                fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{where} is in use by another run, or is being removed; wait for it, or "
                                 f"{elsewhere}") from error
            remove(where)
    parent = next(path for path in where.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free / 1e9
    if need > 0.99 * free:
        raise ValueError(f"{where} needs {need:.1f} GB, and on its disk {free:.1f} GB are free; {elsewhere}")
    where.mkdir(parents=True)
    with open(where / MARKER, "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        marker.write("Made by node/made_up.py, which removes this folder. You may, too.\n")
        marker.flush()
        # A session of its own: Ctrl-C is sent to all of a terminal. -I: node/ is no place to import from.
        return subprocess.Popen([sys.executable, "-I", __file__, where.absolute()], stdin=subprocess.PIPE,
                                start_new_session=True, pass_fds=[marker.fileno()])


def remove(where: Path) -> None:
    """The folder with all that is in it, the marker last. Links are removed, not followed."""
    for path in where.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink()
    (where / MARKER).unlink()
    where.rmdir()


def main():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.readline()
    remove(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
