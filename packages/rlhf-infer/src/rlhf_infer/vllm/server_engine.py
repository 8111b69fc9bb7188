"""Generation with a vLLM server over HTTP, and weights that reach it through a shared file system."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rlhf_data import UserError
from rlhf_infer.engines.protocol import Rollout, SamplingParams
from rlhf_infer.vllm.client import ServerLost, ServerRefused, VLLMClient, wait_for_server
from rlhf_infer.vllm.process import VLLMServer
from rlhf_infer.vllm.settings import (
    LORA_RANKS,
    check_lengths,
    check_requests,
    end_token_ids,
    request_fields,
    returned_logps_are_exact,
    sample_seeds,
)
from rlhf_infer.vllm.weight_export import write_adapter_folder, write_weight_folder

_LOG = logging.getLogger(__name__)
_MAX_RESTARTS = 3
"""How often one call starts a lost server again."""
_CACHE_TRIES = 20
_POLL_S = 0.5
_MODES = ("raw_logprobs", "processed_logprobs")
_EXTENSION = "vllm_worker.WorkerExtension"


class VLLMServerEngine:
    """Generates with a vLLM server over HTTP, one request per sample, many at a time.

    A server that this engine owns is started again when it is lost or hangs: it gets the last weights, and
    what was not finished is drawn again, with the same seeds and so the same samples. A server that is only
    talked to is never started: then a UserError says what happened.

    Args:
        server: a `VLLMServer`, which this engine owns from then on, or the address of any vLLM server (with
            `VLLM_SERVER_DEV_MODE=1` where weights are synced; for adapters with `--enable-lora` and
            `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`).
        tokenizer: for its end-of-sequence token.
        lora: sync LoRA adapters rather than all weights; an owned server's settings decide for it.
        sync_folder: where weights are written for the server to read; both must see it under this path.  None
            makes a temporary folder on this machine.
        timeout_s: longest that one completion, or taking up weights, may last, waiting included; in the
            beginning the longest wait for a server that does not answer yet.
        max_concurrency: requests at a time.
        api_key: sent to the server as bearer token.

    Raises:
        UserError: the server cannot be started or reached.
    """

    def __init__(
        self,
        server: VLLMServer | str,
        tokenizer: Any,
        *,
        lora: bool = False,
        sync_folder: str | Path | None = None,
        timeout_s: float = 600.0,
        max_concurrency: int = 128,
        api_key: str | None = None,
    ) -> None:
        self._server = None if isinstance(server, str) else server
        self.url = server if isinstance(server, str) else server.url
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self._api_key = api_key
        self.tokenizer = tokenizer
        self._max_rank = LORA_RANKS[-1] if lora else None
        if self._server is not None:
            self._max_rank = self._server.settings.max_lora_rank
        self.restarts = 0
        self._run = secrets.token_hex(3)
        self._version = 0
        self._name: str | None = None
        self._pushed: Path | None = None
        self._held: str | None = None
        if self._server is not None:
            self._server.start()
        else:
            wait_for_server(self._client(), self.timeout_s)
        try:
            self._learn()
        except (ServerLost, ServerRefused) as error:
            raise UserError(f"the server at {self.url} cannot be used as a vLLM server: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the server at {self.url} is none of vLLM's: it answers /v1/models otherwise; give the "
                "address of a vLLM server"
            ) from error
        self._temporary = sync_folder is None
        self._sync_folder = Path(sync_folder or tempfile.mkdtemp(prefix="rlhf-sync-")).resolve()

    @property
    def weights_name(self) -> str | None:
        """Name of the weights last synced, different for each; None before the first time."""
        return self._name

    def follow(self, weights_name: str | None) -> None:
        """Sample from the weights that another process's engine has synced to the same server.

        Args:
            weights_name: its `weights_name`.
        """
        self._name = weights_name

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        """Draw `n` completions of each prompt; see `GenerationEngine` and `VLLMEngine.generate`.

        Raises:
            UserError: the request cannot be met, or the server is lost and cannot be started again.
        """
        check_requests(prompts, params, self.max_model_len)
        if params.top_logprobs:
            raise UserError(
                "a vLLM server names the likeliest tokens by their texts, not by their ids; set top_logprobs "
                "to 0, or use vLLM in process"
            )
        distinct = list(dict.fromkeys(tuple(int(token) for token in prompt) for prompt in prompts))
        if not distinct:
            return []
        seeds = sample_seeds(params, distinct, n, first)
        each = len(seeds) // len(distinct)
        fields = request_fields(params, self.eos_token_ids) | {"return_token_ids": True, "model": self._model}
        bodies = [fields | {"prompt": distinct[i // each]} | seed for i, seed in enumerate(seeds)]
        drawn: list[Rollout | None] = [None] * len(bodies)
        self._with_restarts(lambda: self._draw(bodies, drawn))
        found = [rollout for rollout in drawn if rollout is not None]
        groups = {prompt: found[i * each : (i + 1) * each] * (n // each) for i, prompt in enumerate(distinct)}
        return [groups[tuple(prompt)] for prompt in prompts]

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse prompts that are empty, or do not fit `max_model_len` with a completion.

        Raises:
            UserError: a prompt is one of these.
        """
        check_lengths(prompts, max_new_tokens, self.max_model_len)

    def update_weights(self, model: Any) -> None:
        """Hand over the weights of the model being trained; see `VLLMEngine.update_weights`.

        Of several processes that sample from one server one does this, and the others `follow`.

        Raises:
            UserError: the server does not take them, or is lost.
        """
        if self._on_cpu and not self._exact and self._max_rank is None:
            raise UserError(
                f"the vLLM server at {self.url} runs on CPUs, where vLLM takes up new weights in part only; "
                "start it with rlhf_infer.VLLMServer, or sync LoRA adapters",
                code="server_on_cpu",
            )
        self._version += 1
        name = f"policy-{self._run}-v{self._version:04d}"
        folder: Path | None = self._sync_folder / name
        if self._max_rank is None:
            write_weight_folder(model, self._sync_folder / name)
        elif not write_adapter_folder(model, self._sync_folder / name, max_rank=self._max_rank):
            folder = None
        held, old = self._held, self._pushed
        self._name, self._pushed = (name if folder else None), folder
        self._with_restarts(lambda: self._replace(held))
        if old is not None:
            shutil.rmtree(old)

    def exact_logps(self, params: SamplingParams) -> bool:
        """Whether rollouts' log-probs are what a trainer computes for the same tokens.

        Always for servers that `VLLMServer` started without speculation, which scores guesses that were right
        at temperature 1; another one's own log-probs are either at temperature 1
        or of what top-p, top-k, min-p, penalties and `min_new_tokens` leave over.
        """
        if self._server is not None and self._server.settings.speculative_config is not None:
            return params.temperature in (0, 1)
        return self._exact or all(returned_logps_are_exact(mode, params) for mode in self._modes)

    def close(self) -> None:
        """Stop the server where it is owned, and remove the weights written for it."""
        if self._server is not None:
            self._server.stop()
        if self._temporary:
            shutil.rmtree(self._sync_folder, ignore_errors=True)
        elif self._pushed is not None:
            shutil.rmtree(self._pushed)

    @property
    def _model(self) -> str:
        """The name that requests ask for."""
        return self._base_name if self._max_rank is None or self._name is None else self._name

    def _client(self) -> VLLMClient:
        return VLLMClient(self.url, api_key=self._api_key)

    def _learn(self) -> None:
        """Ask the server what it serves."""
        [base, *_] = [card for card in self._ask("/v1/models")["data"] if not card.get("parent")]
        self._base_name: str = base["id"]
        self.max_model_len: int = base["max_model_len"]
        try:
            self.eos_token_ids = end_token_ids(base["root"], self.tokenizer)
        except OSError:  # a folder of the server's machine
            self.eos_token_ids = end_token_ids(None, self.tokenizer)
        self._modes, self._exact, self._on_cpu = _MODES, self._server is not None, False
        if self._server is None:
            with contextlib.suppress(ServerRefused):  # not in development mode
                config = self._ask("/server_info?config_format=json")["vllm_config"]
                self._modes = (config["model_config"]["logprobs_mode"],)
                self._exact = config["parallel_config"]["worker_extension_cls"].endswith(_EXTENSION)
                self._on_cpu = config["device_config"]["device"] == "cpu"
        self._prepare()

    def _prepare(self) -> None:
        """Initialise a server that has just started."""
        if self._exact:
            self._tell("/collective_rpc", {"method": "return_exact_logps"})

    def _push(self) -> None:
        """Let the server load the weights written last, unless it has them."""
        if self._pushed is None or self._held == self._name:
            return
        if self._max_rank is not None:
            self._sync("/v1/load_lora_adapter", {"lora_name": self._name, "lora_path": str(self._pushed)})
        else:
            path = {"weights_path": str(self._pushed)}
            self._sync("/collective_rpc", {"method": "reload_weights", "kwargs": path})
            if self._exact:
                self._sync("/collective_rpc", {"method": "pack_heads"})
            self._reset_cache()
            self._sync("/update_weight_version", {"new_version": self._name})
        self._held = self._name

    def _replace(self, before: str | None) -> None:
        """Push the new weights; then the adapter before them goes, where the server still has it."""
        lost_before = self._held != before
        self._push()
        if self._max_rank is not None and before is not None and not lost_before:
            self._sync("/v1/unload_lora_adapter", {"lora_name": before})
        if self._pushed is None:
            self._held = None

    def _sync(self, path: str, body: Any) -> None:
        try:
            self._tell(path, body)
        except ServerRefused as error:
            hint = "expected weights of the model it serves, under a path that it sees"
            if error.status == 404:
                hint = "start it with VLLM_SERVER_DEV_MODE=1"
                if self._max_rank is not None:
                    hint = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            raise UserError(
                f"the vLLM server at {self.url} refused the weights in {self._pushed}: {error}; {hint}",
                code="weights_refused",
            ) from error

    def _reset_cache(self) -> None:
        """Drop the keys and values of the old weights; calls just broken off may hold them for a moment."""
        for _ in range(_CACHE_TRIES):
            if self._tell("/reset_prefix_cache", None)["success"]:
                return
            time.sleep(_POLL_S)
        raise UserError(
            f"the vLLM server at {self.url} kept its prefix cache, for it has requests of somebody else; "
            "use one server per training run"
        )

    def _check_weights(self) -> None:
        """Refuse to sample from a server whose weights are not those last synced."""
        if self._max_rank is None and self._name is not None:
            found = self._ask("/weight_info")["weight_version"]
            if found != self._name:
                raise UserError(
                    f"the vLLM server at {self.url} has weights {found!r}, expected {self._name!r}: it was "
                    "started again or another run uses it; use one server per training run",
                    code="different_weights",
                )

    def _draw(self, bodies: Sequence[dict[str, Any]], drawn: list[Rollout | None]) -> None:
        """Fill in the rollouts that are missing; when the server is lost, keep those that it finished."""
        self._check_weights()
        missing = [i for i, rollout in enumerate(drawn) if rollout is None]
        client = self._client()
        with ThreadPoolExecutor(min(self.max_concurrency, max(1, len(missing)))) as pool:
            places = {pool.submit(self._complete, client, bodies[i]): i for i in missing}
            try:
                for future in as_completed(places):
                    drawn[places[future]] = future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                client.give_up()
                raise

    def _complete(self, client: VLLMClient, body: dict[str, Any]) -> Rollout:
        """One sample."""
        try:
            answer = client.call("POST", "/v1/completions", body, timeout_s=self.timeout_s)
        except ServerRefused as error:
            if error.status >= 500 and not self._client().healthy(self.timeout_s):
                raise ServerLost(f"failed: {error}") from error
            raise UserError(
                f"the vLLM server at {self.url} refused a completion: {error}", code="completion_refused"
            ) from error
        try:
            [choice] = answer["choices"]
            tokens, logps = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the server at {self.url} returned a completion without token ids and log-probs; "
                "expected vLLM 0.32 or later"
            ) from error
        if reason not in ("stop", "length"):
            raise ServerLost(f"ended a completion for the reason {reason!r}")
        return Rollout(body["prompt"], tokens, logps, reason)

    def _with_restarts(self, action: Callable[[], None]) -> None:
        """Do something, with a server that is started again where this engine owns it and it is lost."""
        for attempt in range(_MAX_RESTARTS + 1):
            try:
                if attempt:
                    self._start_again()
                action()
                return
            except ServerLost as lost:
                if self._server is None or attempt == _MAX_RESTARTS:
                    raise UserError(self._explain(lost), code="server_lost") from lost
                _LOG.warning("the vLLM server at %s %s; starting it again", self.url, lost)

    def _start_again(self) -> None:
        assert self._server is not None
        self.restarts += 1
        self._held = None
        self._server.restart()
        self._prepare()
        self._push()

    def _explain(self, lost: ServerLost) -> str:
        if self._server is not None:
            return (
                f"the vLLM server at {self.url} {lost}, {_MAX_RESTARTS} restarts did not help; raise "
                f"its time limit (vllm_server_timeout in training), now {self.timeout_s:g} s; the end of its "
                f"log {self._server.log_path}:\n{self._server.log_tail()}"
            )
        state = (
            "answers that it is well" if self._client().healthy(self.timeout_s) else "does not answer either"
        )
        return (
            f"the vLLM server at {self.url} {lost} (its health check {state}); start it again, or "
            f"raise its time limit (vllm_server_timeout in training), now {self.timeout_s:g} s"
        )

    def _ask(self, path: str) -> Any:
        return self._client().call("GET", path, timeout_s=self.timeout_s)

    def _tell(self, path: str, body: Any) -> Any:
        return self._client().call("POST", path, body, timeout_s=self.timeout_s)
