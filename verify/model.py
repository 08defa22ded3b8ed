"""A policy folder as a live model: load it, swap its weights in place, run it, and take the rows that predict.

One definition for the node that draws tokens and the auditor that recomputes them: the hidden state of SPEC 10 is
what enters the model's output embeddings. Any causal language model of transformers will do; nothing here knows
an architecture. Not here: batching and caches (node/), margins and proofs (prefill.py, toploc.py), and whether
the folder's bytes are the policy's (its reader checked the root).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from protocol.errors import EngineError, PolicyError
from protocol.outputs import cause
from verify import wide
from verify.packed import PackedLinears
from verify.tensor_file import TensorFile

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Fields of config.json that say who wrote it, not what the model is.
_PROVENANCE: Final = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")
# Weights whose second copy a verifier can spare: a billion parameters in float32.
_PACKED_BYTES: Final = 4 << 30
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"

T = TypeVar("T")


class PolicyModel:
    """A causal language model in evaluation mode on one device, in one dtype.

    vocabulary, hidden_size, max_positions are the configuration's. Raises EngineError, with the folder and the
    reason, when the folder is not a model that transformers can load.
    """

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        self.dtype = _dtype(dtype)
        self.device = torch.device(device)
        self._fields = _config_fields(folder)
        self._model = _load(folder, self.dtype, self.device)
        text: Any = self._model.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.hidden_size = int(text.hidden_size)
        self.max_positions = int(getattr(text, "max_position_embeddings", None) or 2**31)
        self.attention_kinds = _attention_kinds(text)
        self._window = int(getattr(text, "sliding_window", None) or 0)
        head = self._model.get_output_embeddings()
        if head is None:
            raise EngineError(f"the model in {folder} has no output embeddings: it is not a language model")
        self._head: nn.Module = head
        self._tap = _HeadTap()
        head.register_forward_pre_hook(self._tap)
        # transformers renamed the argument; both names are within the versions we accept.
        accepted = inspect.signature(type(self._model).forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._plain_head: bool | None = None
        self._packed: PackedLinears | wide.WideLinears | None = None
        self._checkpointed: list[nn.Module] = []

    def move(self, device: str) -> None:
        """To another device and back, to make room there. Not for a packed one."""
        self._model.to(device)
        self.device = torch.device(device)

    def pack(self) -> None:
        """Run the linear layers from copies made for this CPU's kernels: faster, for more memory. Does nothing for
        other devices and dtypes, and for a model whose copy would be large."""
        size = 4 * sum(each.numel() for each in self._model.parameters())
        if self.device.type != "cpu" or size > _PACKED_BYTES:
            return
        if self.dtype is torch.float32:
            self._packed = PackedLinears(self._model)
        elif self.dtype is torch.bfloat16 and wide.is_worthwhile():
            self._packed = wide.WideLinears(self._model)

    def within(self, work: Callable[[], T]) -> T:
        """What `work` makes of one pass: all of it that touches the weights, `run` and `head`. Here they are there
        anyway; where they are spread over processes they are together within."""
        return work()

    def run(
        self,
        ids: Tensor,
        rows: Tensor | None,
        positions: Tensor | None = None,
        mask: Any = None,
        cache: Any = None,
        *,
        head: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] and logits [N, vocabulary] of chosen rows of a forward pass.

        ids [B, L]; rows: flat indices into B·L in the order wanted, or None for all. Without a mask attention is
        causal, so padding belongs on the right. Without `head` there are no logits: [0, vocabulary].
        """
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
        if positions is not None:
            arguments["position_ids"] = positions
        if mask is not None:
            arguments["attention_mask"] = mask
        if cache is not None:
            arguments[self._cache_argument] = cache
        self._tap.rows, self._tap.closed = rows, not head
        for layer in self._checkpointed:
            # Layers do it in training mode alone, and then keep no cache. They are put there without what is inside
            # them, whose dropout stays off.
            layer.training = cache is None and torch.is_grad_enabled()
        logits: Tensor = self._model(**arguments).logits[0]
        return self._tap.take(), logits

    def new_cache(self) -> Any:
        """An empty cache of transformers' own for `run`: all rows of a pass have equally long pasts."""
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocabulary] of hidden states [N, hidden], for heads that `head_is_plain`."""
        with self._tap.aside():
            logits: Tensor = self._head(hidden)
        return logits

    def head_is_plain(self) -> bool:
        """Whether the logits are the output embeddings of the hidden states and nothing more (no soft cap, no
        scale): then long outputs may be computed piece by piece. Found by trying, once."""
        if self._plain_head is None:
            ids = torch.arange(2, device=self.device)[None] % self.vocabulary
            # Loud enough for a soft cap to show.
            self._tap.gain = 64.0
            hidden, logits = self.run(ids, None)
            self._plain_head = torch.allclose(self.head(hidden), logits, rtol=1e-2, atol=1e-2)
        return self._plain_head

    def causal_mask(self, positions: Tensor, columns: int) -> Any:
        """Additive attention mask for queries at positions [B, L] over keys in columns 0..columns-1, column =
        position. In the form the model wants: a tensor [B, 1, L, columns], or one a kind of attention."""
        if not self.takes_masks:
            other = ", ".join(sorted(self.attention_kinds - {_FULL, _SLIDING}))
            raise EngineError(f"this engine cannot decode a model with {other}: use vLLM for this policy")
        behind = positions[:, :, None] - torch.arange(columns, device=self.device)
        return self.attention_mask(behind >= 0, behind)

    @property
    def takes_masks(self) -> bool:
        """Whether every layer attends by a mask, so that who sees what may be chosen."""
        return self.attention_kinds <= {_FULL, _SLIDING}

    def attention_mask(self, seen: Tensor, behind: Tensor) -> Any:
        """Additive attention mask from which keys each query sees, bool [B, L, keys], and how many positions behind
        it they are, int [B, L, keys]: sliding attention also ends there. For models that `takes_masks`."""
        masks = {
            kind: self._additive((seen if kind == _FULL else seen & (behind < self._window))[:, None])
            for kind in self.attention_kinds
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def checkpoint_layers(self) -> None:
        """Keep no activations inside the layers for a backward pass without cache: they are computed again there.

        Raises EngineError for an architecture that transformers cannot do this for.
        """
        # transformers renamed it; both names are within the versions we accept.
        new = getattr(self._model, "activation_checkpointing_enable", None)
        enable = new or self._model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise EngineError(f"no gradient checkpointing for this policy: {cause(error)}") from None
        self._checkpointed = [each for each in self._model.modules() if getattr(each, "gradient_checkpointing", False)]

    def _additive(self, seen: Tensor) -> Tensor:
        blank = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(seen, blank, torch.finfo(self.dtype).min)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The live weights under every name a file may give them: tied ones are one tensor with several names."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    def layers(self) -> list[nn.Module]:
        """The layers between the embeddings, from outer to inner modules."""
        names = set(self._model._no_split_modules or ())
        return [module for module in self._model.modules() if type(module).__name__ in names]

    def linear_weights(self) -> frozenset[str]:
        """Names of the matrices of the layers between the embeddings, without these."""
        outer = {id(each) for each in (self._head, self._model.get_input_embeddings())}
        return frozenset(
            f"{name}.weight"
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear) and id(module) not in outer
        )

    def swap(self, folder: Path) -> bool:
        """Copy the folder's weights into the live model. False, with nothing changed, when the folder holds
        another architecture or other tensors; then load it anew.

        Raises EngineError when the files cannot be read; if that happens midway the model is unusable.
        """
        if _config_fields(folder) != self._fields:
            return False
        targets: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        with _tensor_files(folder) as files:
            if not _fits(files, targets):
                return False
            with torch.inference_mode():
                for file in files:
                    for name in file.names:
                        self._fill(targets[name], file.tensor(name))
        if self._packed is not None:
            self._packed.refresh()
        return True

    def _fill(self, target: Tensor, stored: Tensor) -> None:
        target.copy_(stored)

    def spot_check(self, folder: Path) -> None:
        """Hold the first and the last row of every live tensor against the folder's files. Raises EngineError.

        Tensors that the architecture keeps under another name, or in another shape, than the files are passed over.
        """
        live: dict[str, Tensor] = self._model.state_dict()
        with _tensor_files(folder) as files:
            for file in files:
                for name in file.names:
                    if name in live and live[name].shape == file.shape(name) and live[name].numel():
                        _check_rows(name, live[name], file.tensor(name))


class _HeadTap:
    """Stands before the output embeddings: keeps the rows that are wanted and lets only these through."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.closed = False  # let no row through
        self.gain: float | None = None  # multiply the rows by this, once
        self._hidden: Tensor | None = None
        self._aside = False

    def __call__(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._aside:
            return None
        flat = arguments[0].flatten(0, -2)
        self._hidden = flat if self.rows is None else flat[self.rows]
        if self.gain is not None:
            self._hidden, self.gain = self._hidden * self.gain, None
        passed = self._hidden[:0] if self.closed else self._hidden
        return (passed[None], *arguments[1:])

    def take(self) -> Tensor:
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise EngineError("the model gave no hidden states to its output embeddings: it cannot be proved")
        return hidden

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._aside = True
        try:
            yield
        finally:
            self._aside = False


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise EngineError(f"'{name}' is not a dtype of this engine: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _config_fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return {key: value for key, value in fields.items() if key not in _PROVENANCE}
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"{path} is not a model's configuration: {cause(error)}") from None


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        # Pickled weights and code from the folder stay shut: both run what a stranger wrote.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds for a bad folder
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineError(f"{folder} is not a policy that transformers can load: {first}") from error
    model, told = loaded
    if missing := sorted(told["missing_keys"]):
        raise EngineError(
            f"the weights in {folder} lack {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}, which "
            "transformers would make up: save the whole model there"
        )
    try:
        return model.eval().requires_grad_(False).to(device)
    except torch.OutOfMemoryError as error:
        raise EngineError(f"the policy in {folder} does not fit on {device} as {dtype}: use a larger one") from error


def _attention_kinds(config: Any) -> frozenset[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return frozenset(kinds)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return frozenset([_SLIDING if slides else _FULL])


@contextmanager
def _tensor_files(folder: Path) -> Iterator[list[TensorFile]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise EngineError(f"{folder} holds no .safetensors file: a policy's weights are kept in these")
    try:
        yield [TensorFile(path) for path in paths]
    except (PolicyError, OSError) as error:
        raise EngineError(f"the weights in {folder} cannot be read: {cause(error)}") from error


def _check_rows(name: str, live: Tensor, stored: Tensor) -> None:
    pairs = ((live, stored),) if not live.ndim else ((live[:1], stored[:1]), (live[-1:], stored[-1:]))
    for ours, theirs in pairs:
        if not torch.allclose(ours.cpu(), theirs.to(ours.dtype), rtol=0, atol=0, equal_nan=True):
            raise EngineError(f"{name} in the engine is not what the policy's files hold: load the policy again")


def _fits(files: list[TensorFile], targets: dict[str, Tensor]) -> bool:
    """Whether the files hold every tensor of the model (a tied one, the same object, under any of its names) and no
    other."""
    filled = set()
    for file in files:
        for name in file.names:
            if name not in targets or targets[name].shape != file.shape(name):
                return False
            filled.add(id(targets[name]))
    return all(id(tensor) in filled for tensor in targets.values())
