"""Does what the Dockerfile does without Docker, and tries what it leaves: `python3 scripts/docker_steps.py`.

Copies what the Dockerfile copies to an empty folder and installs it there. Then, as the image's user in a
root where only /tmp, /cache and /work can be written, starts the image's command, asks its health check, gets
a completion, ends it, and trains for a step. Needs Linux, root, uv, a system Python 3.11 or later, minutes,
and 3 GB in /var/tmp. UV_FIND_LINKS may name a folder with torch for CPUs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
USER = 10001
WRITABLE = ("/tmp", "/cache", "/work")
_SHARED = ("/bin", "/sbin", "/lib", "/lib64", "/usr", "/etc", "/proc", "/dev")
"""What the root has of this machine, beside the environment."""


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Name and arguments of every instruction, continued lines joined."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.M)
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


def copied(dockerfile: Path) -> list[str]:
    """What is copied from the repository."""
    lines = [rest.split() for name, rest in instructions(dockerfile) if name == "COPY"]
    return [source for words in lines if not words[0].startswith("--from=") for source in words[:-1]]


def settings(dockerfile: Path) -> dict[str, str]:
    """The variables of the last stage, and the arguments' defaults."""
    found: dict[str, str] = {}
    for name, rest in instructions(dockerfile):
        if name in ("ARG", "ENV"):
            for word in shlex.split(rest):
                key, _, value = word.partition("=")
                found.setdefault(key, value) if name == "ARG" else found.__setitem__(key, value)
    return found


def command(dockerfile: Path, name: str) -> list[str]:
    """The words of the last CMD or HEALTHCHECK."""
    last = [rest for each, rest in instructions(dockerfile) if each == name][-1]
    return json.loads(last[last.index("[") :])


@contextmanager
def _fresh() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rlhf-docker-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(folder: Path, dockerfile: Path) -> Path:
    """The build stage; the environment that it makes."""
    source, target = folder / "src", folder / "rlhf"
    tracked = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", *copied(dockerfile)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, tracked.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    python = next(path for path in ("/usr/local/bin/python3", "/usr/bin/python3") if Path(path).exists())
    kept = {name: os.environ[name] for name in os.environ.keys() - {"VIRTUAL_ENV", "PYTHONPATH"}}
    given = {name: settings(dockerfile)[name] for name in ("TORCH_CPU", "UV_LINK_MODE")}
    subprocess.run(
        ["scripts/docker_install.sh", str(target)],
        cwd=source,
        check=True,
        env=kept | given | {"PYTHON": python},
    )
    return target


class Image:
    """A root with an environment in it, in which the image's user runs commands."""

    def __init__(self, folder: Path, target: Path, dockerfile: Path) -> None:
        self.root, self.target = folder / "root", target
        variables = settings(dockerfile)
        names = [
            name for name in variables if name.isupper() and name not in ("DEVICE", "EXTRAS", "TORCH_CPU")
        ]
        self.environment = {name: variables[name] for name in names if not name.startswith("UV_")}
        self.environment["PATH"] = f"{target}/bin:/usr/local/bin:/usr/bin:/bin"
        for place in (*_SHARED, *WRITABLE, str(target)):
            (self.root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for place in WRITABLE:
            (folder / "disk" / place.lstrip("/")).mkdir(parents=True)
            os.chown(folder / "disk" / place.lstrip("/"), USER, USER)
        binds = [(place, place, "ro") for place in (*_SHARED, str(target)) if Path(place).exists()]
        binds += [(f"{folder}/disk{place}", place, "rw") for place in WRITABLE]
        lines = ["mount --make-rprivate /", f"mount --bind {self.root} {self.root}"]
        for source, place, mode in binds:
            lines.append(f"mount --rbind {source} {self.root}{place}")
            if mode == "ro" and place not in ("/proc", "/dev"):
                lines.append(f"mount -o remount,bind,ro {self.root}{place}")
        self._mounts = "\n".join([*lines, f"mount -o remount,bind,ro {self.root}"])

    def start(self, words: list[str], **options: object) -> subprocess.Popen[str]:
        """Start a command in /work."""
        user = f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs --bounding-set -all"
        script = f"{self._mounts}\nexec chroot {self.root} {user} env -C /work {shlex.join(words)}"
        return subprocess.Popen(
            ["unshare", "--mount", "bash", "-euc", script],
            env=self.environment | {"PATH": f"{self.environment['PATH']}:/usr/sbin:/sbin"},
            text=True,
            **options,  # pyright: ignore
        )

    def run(self, *words: str) -> int:
        """The exit code of a command."""
        return self.start(list(words)).wait(timeout=600)


def try_server(image: Image, dockerfile: Path) -> None:
    """The image's command, its health check, a completion, and its end."""
    server = image.start(command(dockerfile, "CMD"))
    try:
        deadline = time.monotonic() + 300
        check = command(dockerfile, "HEALTHCHECK")
        while image.start(check, stderr=subprocess.DEVNULL).wait() != 0:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(2)
        print("health check: ok", flush=True)
        url = "http://127.0.0.1:8000/v1"
        with urllib.request.urlopen(f"{url}/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        body = json.dumps({"model": model, "prompt": "mary went", "max_tokens": 4, "best_of": 2}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            print("completion:", json.load(answer)["choices"][0], flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(timeout=120)
    assert status == 0, f"the server ended with {status}"


def main() -> None:
    """All steps; an exception where one fails."""
    dockerfile = ROOT / "Dockerfile"
    with _fresh() as folder:
        target = install(folder, dockerfile)
        image = Image(folder, target, dockerfile)
        assert image.run("sh", "-c", "! touch /usr/x /x 2>/dev/null && touch /tmp/x /cache/x /work/x") == 0
        assert image.run("sh", "-c", f"test $(id -u) = {USER}") == 0
        for name in ("rlhf-train", "rlhf-serve", "rlhf-report", "rlhf-merge"):
            assert image.run(name, "--version") == 0
        try_server(image, dockerfile)
        assert image.run("rlhf-train", "sft", "--max-steps", "1", "--output-dir", "/work/run") == 0
        assert (folder / "disk/work/run/results.json").exists()
    print("all steps: ok")


if __name__ == "__main__":
    sys.exit(main())
