"""`rlhf-serve` under load: best-of-8 with scoring against generating and scoring alone, overhead, overload.

A policy and a reward model of the same size with random weights, fp32. Four measurements:

- `throughput`: the seconds of generating (by the engine alone, all requests in one call; vLLM with its own
  `n`) and scoring (by the reward model alone, all in one call), over those of the server with as many clients
  at once. 1 is a server that costs nothing beside both.
- `overhead`: milliseconds of a request for one unscored completion through HTTP, less those of the engine by
  itself, in another process; and where they go: in the server's own generation, and outside of it.
- `soak`: clients in a closed loop: latencies, errors, and the resident memory over time.
- `overload`: ten times as many requests as the queue holds, all at once.

In the first two, server and engine take turns, and medians are of the turns' ratios and differences.
With vLLM also what its asynchronous engine alone takes beside the synchronous one.

Prints JSON. vLLM needs an environment of its own: `--vllm-python`, or VLLM_PYTHON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from offline_vs_trl import HH_DATA, SHAPES, describe, read_pairs
from online_compare import make_models

from rlhf_data import UserError, atomic_write_json

SOURCES = [
    str(path) for folder in ("packages", "apps") for path in Path(__file__).parents[1].glob(f"{folder}/*/src")
]
MODEL = "policy"


@contextmanager
def server(python: str, backend: str, folder: Path, task: dict[str, Any], *more: str) -> Iterator[Any]:
    """A server process; gives its URL and its process id."""
    log = folder / f"{backend}.log"
    command = [python, "-m", "rlhf_serve", "--port", "0", "--backend", backend, "--dtype", "float32"]
    command += ["--model", str(folder / MODEL), "--reward-model", str(folder / "reward"), *more]
    if backend == "vllm":
        command += ["--set", f"vllm_options={json.dumps(task['vllm'])}"]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment(python, task))
    try:
        while True:
            if process.poll() is not None:
                raise UserError(f"the server ended: {log.read_text()[-2000:]}")
            found = re.search(r"open (http://\S+)/ for the page", log.read_text())
            if found:
                break
            time.sleep(0.1)
        httpx.get(f"{found[1]}/ready", timeout=60).raise_for_status()
        yield found[1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def environment(python: str, task: dict[str, Any]) -> dict[str, str]:
    """For another Python the sources; as many threads as the task says."""
    env = os.environ | {"OMP_NUM_THREADS": str(task["threads"]), "HF_HUB_OFFLINE": "1"}
    if python != sys.executable:
        env |= {"PYTHONPATH": os.pathsep.join(SOURCES), "TORCHDYNAMO_DISABLE": "1"}
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


@contextmanager
def alone(python: str, backend: str, folder: Path, task: dict[str, Any]) -> Iterator[Callable[[str], float]]:
    """Engine and reward model without a server, in a process beside it: seconds of a call by its name."""
    command = [python, str(Path(__file__).with_name("serve_raw.py")), backend, str(folder)]
    env = environment(python, task) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # as the server sets it too
    log = folder / f"{backend}_alone.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    asked, told = process.stdin, process.stdout
    assert asked and told

    def read(what: str | None = None) -> str:
        if what:
            asked.write(f"{what}\n")
            asked.flush()
        for line in told:
            if line == "ready\n" or (what and re.fullmatch(r"[\d.e-]+\n", line)):  # vLLM prints lines too
                return line
        raise UserError(f"{backend} alone ended: {log.read_text()[-2000:]}")

    try:
        read()
        yield lambda what: float(read(what))
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # vLLM's own processes too
        process.communicate()


class Load:
    """Clients of one server.

    Args:
        url: of the server.
        task: what is asked for.
    """

    def __init__(self, url: str, task: dict[str, Any]) -> None:
        self.url, self.task = url, task
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []
        self.generating: list[float] = []

    async def ask(self, client: httpx.AsyncClient, prompt: str, best_of: int) -> None:
        """One request."""
        body = {"model": MODEL, "prompt": prompt, "best_of": best_of, "max_tokens": self.task["tokens"]}
        body |= {"min_tokens": self.task["tokens"], "return_candidates": best_of > 1}
        if best_of == 1:  # asked for by its number, one would be scored too
            body["selection"] = "none"
        start = time.perf_counter()
        answer = await client.post(f"{self.url}/v1/completions", json=body)
        self.seconds.append(time.perf_counter() - start)
        self.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            said = answer.json()
            self.generating.append(said["timing"]["generate_s"])
            if said["usage"]["candidates"] != best_of:
                raise UserError("the server drew another number of candidates")

    async def at_once(self, best_of: int) -> float:
        """All prompts at the same time; seconds until the last answer."""
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
            start = time.perf_counter()
            await asyncio.gather(*(self.ask(client, p, best_of) for p in self.task["prompts"]))
            return time.perf_counter() - start

    async def single(self, count: int, engine: Callable[[str], float]) -> list[float]:
        """Requests for one completion, each with one of the engine alone behind it; the engine's seconds."""
        async with httpx.AsyncClient(timeout=None) as client:
            await self.ask(client, self.task["prompts"][0], 1)
            self.seconds.clear()
            self.generating.clear()
            engine("single")
            found = []
            for _ in range(count):
                await self.ask(client, self.task["prompts"][0], 1)
                found.append(engine("single"))
        return found

    async def loop(self, clients: int, seconds: float, best_of: int, pid: int) -> list[float]:
        """Clients that ask again and again; resident memory in MB, twenty times."""
        end, memory = time.perf_counter() + seconds, []

        async def one(number: int) -> None:
            async with httpx.AsyncClient(timeout=None) as client:
                while time.perf_counter() < end:
                    prompts = self.task["prompts"]
                    await self.ask(client, prompts[(number + len(self.seconds)) % len(prompts)], best_of)

        async def watch() -> None:
            while time.perf_counter() < end:
                memory.append(resident_mb(pid))
                await asyncio.sleep(seconds / 20)

        await asyncio.gather(watch(), *(one(i) for i in range(clients)))
        return memory


def resident_mb(pid: int) -> float:
    """Memory of a process and its children."""
    total, pids = 0.0, [pid]
    while pids:
        one = pids.pop()
        try:
            text = Path(f"/proc/{one}/status").read_text()
            pids += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except OSError:  # it ended meanwhile
            continue
        total += int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # pyright: ignore
    return total


def percentile(values: list[float], share: float) -> float:
    """A value that so large a share is below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(backend: str, folder: Path, task: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """All measurements of a backend; server and engine alone take turns."""
    python = options.vllm_python if backend == "vllm" else sys.executable
    count, turns = len(task["prompts"]), range(task["repeats"])
    wide = ["--max-waiting", "1000", "--set", "max_running=256"]
    with server(python, backend, folder, task, *wide) as (url, pid):
        with alone(python, backend, folder, task) as engine:
            load, together, work = Load(url, task), [], []
            asyncio.run(load.at_once(task["n"]))
            for _ in turns:
                together.append(asyncio.run(load.at_once(task["n"])))
                work.append((engine("generate"), engine("score")))
            one = Load(url, task)
            single = asyncio.run(one.single(10 * task["repeats"], engine))
        soak = Load(url, task)
        memory = asyncio.run(soak.loop(options.clients, options.seconds, task["n"], pid))
    generate, score = (statistics.median(each) for each in zip(*work, strict=True))
    shares = [sum(parts) / seconds for parts, seconds in zip(work, together, strict=True)]
    served, drawn = one.seconds, one.generating
    over = [a - b for a, b in zip(served, single, strict=True)]
    inside = [a - b for a, b in zip(drawn, single, strict=True)]
    outside = [a - b for a, b in zip(served, drawn, strict=True)]
    return {
        "backend": backend,
        "throughput": {
            "requests_per_second": count / statistics.median(together),
            "alone_requests_per_second": count / (generate + score),
            "share_of_alone": statistics.median(shares),
            "shares": shares,
            "generate_seconds_per_request": generate / count,
            "score_seconds_per_request": score / count,
        },
        "overhead": {
            "request_ms": 1000 * statistics.median(served),
            "engine_ms": 1000 * statistics.median(single),
            "overhead_ms": 1000 * statistics.median(over),
            "overhead_quartiles_ms": [1000 * each for each in statistics.quantiles(over)],
            "in_generation_ms": 1000 * statistics.median(inside),
            "outside_generation_ms": 1000 * statistics.median(outside),
        },
        "soak": {
            "clients": options.clients,
            "seconds": options.seconds,
            "requests": len(soak.seconds),
            "statuses": dict(soak.statuses),
            "p50_seconds": percentile(soak.seconds, 0.5),
            "p99_seconds": percentile(soak.seconds, 0.99),
            "memory_mb": [round(each) for each in memory],
        },
        "overload": overload(python, backend, folder, task),
    } | ({"asynchronous_engine": asynchronous(python, folder, task)} if backend == "vllm" else {})


def asynchronous(python: str, folder: Path, task: dict[str, Any]) -> dict[str, float]:
    """What vLLM's asynchronous engine, which a server needs, takes beside its synchronous one; no server."""
    with alone(python, "vllm", folder, task) as plain, alone(python, "vllm-async", folder, task) as served:
        turns = range(task["repeats"])
        shares = [plain("generate") / served("generate") for _ in turns]
        over = [served("single") - plain("single") for _ in range(10 * len(turns))]
    return {"share_of_synchronous": statistics.median(shares), "over_ms": 1000 * statistics.median(over)}


def overload(python: str, backend: str, folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Ten times the queue at once: some are served, the others refused at once."""
    queue = 8
    narrow = ["--max-waiting", str(queue), "--set", "max_running=4"]
    with server(python, backend, folder, task, *narrow) as (url, _):
        prompts = (task["prompts"] * (10 * queue))[: 10 * queue]
        load = Load(url, task | {"prompts": prompts})
        asyncio.run(load.at_once(task["n"]))
        after = Load(url, task | {"prompts": prompts[:1]})
        asyncio.run(after.at_once(task["n"]))
    return {
        "queue": queue,
        "requests": len(prompts),
        "statuses": dict(load.statuses),
        "served_after": after.statuses[200] == 1,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", choices=("transformers", "vllm"), default=["transformers"])
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"), help="Python with vLLM")
    parser.add_argument("--shape", choices=SHAPES, default="9M")
    parser.add_argument("--requests", type=int, default=32, help="at once, for the throughput (32)")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion (64)")
    parser.add_argument("--clients", type=int, default=64, help="of the soak (64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the soak (60)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="torch threads (all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="merge the JSON into this file, by backend")
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(shape="tiny", requests=4, tokens=8, clients=4, seconds=1.0, repeats=2)
    if "vllm" in options.backends and not options.vllm_python:
        parser.error("--backends vllm needs --vllm-python or VLLM_PYTHON")
    pairs = read_pairs(None if options.quick else HH_DATA, 300)
    prompts = [pair["prompt"] for pair in pairs]
    prompts = [prompt for prompt in prompts if len(prompt) < 600][: options.requests]
    task = {"prompts": prompts, "n": 8, "tokens": options.tokens, "repeats": options.repeats}
    task |= {"threads": options.threads}
    task |= {"vllm": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "max_model_len": 512}}
    results: dict[str, Any] = {"benchmark": "serve", "shape": options.shape, "requests": len(prompts), "n": 8}
    results |= {"tokens": options.tokens, "threads": options.threads} | describe() | {"backends": []}
    if options.output and options.output.exists():
        results["backends"] = json.loads(options.output.read_text(encoding="utf-8"))["backends"]
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_models(folder, options.shape, pairs)
            (folder / "task.json").write_text(json.dumps(task))
            for backend in options.backends:
                found = {"commit": results["commit"]} | measure(backend, folder, task, options)
                results["backends"] = [
                    *(each for each in results["backends"] if each["backend"] != backend),
                    found,
                ]
                if options.output:
                    atomic_write_json(options.output, results)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
