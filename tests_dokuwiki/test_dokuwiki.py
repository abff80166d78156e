"""One real web application, played as `openended` with a check by code:  make test-dokuwiki

DokuWiki is Debian's package, served by PHP on 127.0.0.1. The Makefile unpacks both into .dokuwiki/: nothing
is installed. A trajectory logs in, searches and edits a page by what stands on the page; the check reads
the page's text file on disk.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from data import parse_action, start
from worlds.live import Live, task

UNPACKED = Path(__file__).resolve().parent.parent / ".dokuwiki"
MODULES = ("ctype", "tokenizer", "dom", "xml", "simplexml", "posix", "fileinfo", "iconv")
USERS = "eve:{password}:Eve:eve@example.org:admin,user\n"
ACL = "*\t@ALL\t1\n*\t@user\t8\n"  # all may read, users may write
SETTINGS = """<?php
$conf['title'] = 'Tea wiki'; $conf['useacl'] = 1; $conf['superuser'] = '@admin'; $conf['updatecheck'] = 0;
$conf['disableactions'] = 'register,resendpwd';
"""
TEA = "====== Green tea ======\n\nGreen tea is steeped at 90 degrees.\n"


class Wiki:
    """DokuWiki from its packages in `root`, on a free port."""

    def __init__(self, root: Path):
        self.root, self.data = root, root / "var/lib/dokuwiki/data"
        # The packages know where they are installed. Here that is `root`.
        files = [*root.rglob("*.php"), *root.rglob("*.inc")]
        for file in [file for file in files if not file.is_symlink()]:
            text = file.read_bytes()
            moved = re.sub(rb"""(['"])/(?=(?:usr/share|etc/dokuwiki|var/lib/dokuwiki)\b)""",
                           rb"\1" + str(root).encode() + b"/", text)
            if moved != text:
                file.write_bytes(moved)
        for name in ("plugins", "tpl"):
            link = root / "usr/share/dokuwiki/lib" / name
            link.unlink()
            link.symlink_to(root / "var/lib/dokuwiki/lib" / name)
        conf = root / "etc/dokuwiki"
        self.php = [str(next((root / "usr/bin").glob("php[0-9]*"))), "-n"]
        folder = next((root / "usr/lib/php").glob("2*"))
        self.php += [f"-dextension={file}" for name in MODULES if (file := folder / f"{name}.so").exists()]
        self.php += [f"-dsession.save_path={root.parent}", "-ddisplay_errors=0", "-dmemory_limit=256M"]
        password = self.run("echo password_hash('tea-time', PASSWORD_BCRYPT);")
        for name, text in (("local.php", SETTINGS), ("users.auth.php", USERS.format(password=password)),
                           ("acl.auth.php", ACL)):
            (conf / name).unlink(missing_ok=True)  # a link to nowhere
            (conf / name).write_text(text)
        (self.data / "pages/green_tea.txt").write_text(TEA)
        indexer = root / "usr/share/dokuwiki/bin/indexer.php"
        subprocess.run([*self.php, str(indexer)], check=True, capture_output=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def run(self, code: str) -> str:
        return subprocess.run([*self.php, "-r", code], check=True, capture_output=True, text=True).stdout

    def serve(self) -> subprocess.Popen:
        server = subprocess.Popen(
            [*self.php, "-S", f"127.0.0.1:{self.port}", "-t", str(self.root / "usr/share/dokuwiki")],
            stdout=subprocess.DEVNULL, stderr=open(self.root / "php.log", "w"),
            env=os.environ | {"PHP_CLI_SERVER_WORKERS": "4"}, start_new_session=True)
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{self.url}/doku.php", timeout=30).close()
                return server
            except OSError:
                time.sleep(0.1)
        stop(server)
        raise RuntimeError(f"DokuWiki does not answer: {(self.root / 'php.log').read_text()[-2000:]}")


def stop(server: subprocess.Popen) -> None:
    os.killpg(server.pid, signal.SIGTERM)  # its workers too
    server.wait()


@pytest.fixture(scope="module")
def wiki(tmp_path_factory):
    if not (UNPACKED / "root").exists():
        pytest.fail("no DokuWiki in .dokuwiki/: run make test-dokuwiki")
    root = tmp_path_factory.mktemp("wiki") / "root"
    shutil.copytree(UNPACKED / "root", root, symlinks=True)
    wiki = Wiki(root)
    server = wiki.serve()
    yield wiki
    stop(server)


def play(web, name, script):
    """Plays a task. An action names its element by a part of its line: click link 'Log In'. Returns the last
    obs, the reward, and whether it ended."""
    [obs] = web.reset([start(name)])
    for text in script:
        if found := re.match(r"(click|type) (\w+ '.*?')", text):
            line = re.search(rf"^\t*\[(\d+)\] .*{re.escape(found[2])}", obs.page, re.MULTILINE)
            assert line, f"{text}: nothing like that on\n{obs.page}"
            text = f"{found[1]} [{line[1]}]{text[found.end():]}"
        [obs], [reward], [terminated], [truncated] = web.step([parse_action(text)])
        assert not truncated and not obs.error, f"{text}: {obs.error}"
    return obs, reward, terminated


LOGIN = ["click link 'Log In'", "type textbox 'Username' [eve] [0]", "type textbox 'Password' [tea-time] [1]"]
SEARCH = ["type textbox '[F]' [steeped] [1]", "click link 'green_tea'"]
EDIT = ["click link 'Edit this page [e]'",
        r"type textbox '' [====== Green tea ======\n\nGreen tea is steeped at 80 degrees.\n] [0]",
        "click button 'Save'"]


def test_log_in_search_and_edit_a_page_of_a_real_wiki(wiki):
    """Guards: a world that plays our stand-ins and no real application: forms, redirects, cookies, sessions,
    tokens, a page that asks before it is left."""
    file = wiki.data / "pages/green_tea.txt"
    goal = ("Log in as eve (password tea-time). Find out at how many degrees green tea is steeped. Correct "
            "it to 80, and answer with what stood there.")

    def check(name, obs, answer):
        return "at 80 degrees" in file.read_text() and answer.strip() == "90"

    with Live({"edit": task(f"{wiki.url}/doku.php", goal)}, check=check, timeout=60) as web:
        obs, reward, terminated = play(web, "edit", LOGIN)
        assert "link 'Log Out'" in obs.page, obs.page
        # A new trajectory knows nothing of the log-in, and what was not corrected pays nothing.
        obs, reward, terminated = play(web, "edit", ["stop [90]"])
        assert "link 'Log In'" in obs.page and (reward, terminated) == (0.0, True)
        obs, reward, terminated = play(web, "edit", [*LOGIN, *SEARCH, *EDIT, "stop [90]"])
        assert (reward, terminated) == (1.0, True), obs.page
        assert file.read_text() == TEA.replace("90", "80")
