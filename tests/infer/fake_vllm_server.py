"""A small server that speaks vLLM's protocol: run in its place, it draws from a hash instead of a model.

Its completions depend on seed, prompt and the bytes of the weights, so that whoever serves other weights is
found out. Files in the folder FAKE_VLLM steer it: requests for a prompt with token 99 wait for `gate`, and
those with token 98 end the server; `refuse` holds a status that completions are answered with.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

STEER = Path(os.environ["FAKE_VLLM"])
WAITS, ENDS = 99, 98


class State:
    model = base = ""
    version = "default"
    extension = ""
    adapters: ClassVar[dict[str, str]] = {}


def weights(name: str) -> bytes:
    folder = Path(State.adapters.get(name, State.model))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


def complete(body: dict[str, Any]) -> dict[str, Any]:
    key = hashlib.blake2b(weights(body["model"])).hexdigest(), body["prompt"], body.get("seed")
    draws = [hashlib.blake2b(repr((key, k)).encode()).digest() for k in range(body["max_tokens"])]
    tokens, logps = [3 + draw[0] % 90 for draw in draws], [-draw[1] / 100 for draw in draws]
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logps}, "finish_reason": "length"}
    return {"choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        del format, args

    def answer(self, content: Any = None, status: int = 200) -> None:
        data = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int, message: str) -> None:
        self.answer({"error": {"message": message}}, status)

    def do_GET(self) -> None:
        model = {"id": State.base, "root": State.base, "parent": None, "max_model_len": 64}
        config = {
            "device_config": {"device": "cpu"},
            "model_config": {"logprobs_mode": "raw_logprobs"},
            "parallel_config": {"worker_extension_cls": State.extension},
        }
        answers = {
            "/health": None,
            "/v1/models": {"data": [model, *({"id": name, "parent": "x"} for name in State.adapters)]},
            "/server_info?config_format=json": {"vllm_config": config},
            "/weight_info": {"weight_version": State.version},
        }
        if self.path in answers:
            self.answer(answers[self.path])
        else:
            self.refuse(404, "cannot be found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        with (STEER / "calls").open("a") as calls:
            calls.write(json.dumps([self.path, body]) + "\n")
        getattr(self, self.path.rpartition("/")[2])(body)

    def collective_rpc(self, body: dict[str, Any]) -> None:
        if body["method"] == "reload_weights":
            path = body["kwargs"]["weights_path"]
            if not (Path(path) / "model.safetensors").is_file():
                self.refuse(500, f"no weights in {path}")
                return
            State.model = path
        self.answer({"results": [None]})

    def reset_prefix_cache(self, body: dict[str, Any]) -> None:
        del body
        busy = STEER / "busy"
        self.answer({"success": not busy.exists()})
        busy.unlink(missing_ok=True)

    def update_weight_version(self, body: dict[str, Any]) -> None:
        State.version = body["new_version"]
        self.answer({"success": True})

    def load_lora_adapter(self, body: dict[str, Any]) -> None:
        if body["lora_name"] in State.adapters:
            self.refuse(400, "has already been loaded")
            return
        State.adapters[body["lora_name"]] = body["lora_path"]
        self.answer("Success")

    def unload_lora_adapter(self, body: dict[str, Any]) -> None:
        if State.adapters.pop(body["lora_name"], None) is None:
            self.refuse(404, "cannot be found")
            return
        self.answer("Success")

    def completions(self, body: dict[str, Any]) -> None:
        if ENDS in body["prompt"]:
            os._exit(3)
        while WAITS in body["prompt"] and not (STEER / "gate").exists():
            time.sleep(0.01)
        status = STEER / "refuse"
        if status.exists():
            self.refuse(int(status.read_text()), "as told")
        elif body["model"] not in (State.base, *State.adapters):
            self.refuse(404, f"The model `{body['model']}` does not exist.")
        else:
            self.answer(complete(body))


def main() -> None:
    values = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    if (STEER / "fails").exists():
        print("out of memory, says the server")
        sys.exit(int((STEER / "fails").read_text()))
    State.model = State.base = values["--model"]
    State.extension = values["--worker-extension-cls"]
    server = ThreadingHTTPServer(("127.0.0.1", int(values["--port"])), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
