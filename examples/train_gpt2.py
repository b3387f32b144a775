"""Train a small byte-level GPT-2 on text that every Python carries, wrapped at ``bf16-mixed``.

The forward computes in bfloat16; the loss outside the wrapper is written for float32 and gets it. Bytes are
the tokens, so no tokenizer is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from statistics import mean
from sysconfig import get_paths

import torch
import torch.nn.functional as F
from report import Mismatch
from torch import nn

import lite_ext

CONTEXT = 64
BATCH = 16
LEAST_BYTES = 20_000


def texts() -> Iterator[tuple[str, str]]:
    """Yield (where it is from, text): the Python language reference of ``help()``, then licence files."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        pass
    else:
        yield "the Python language reference (pydoc_data.topics)", "\n".join(topics.values())
    for name in ("LICENSE.txt", "LICENSE"):
        path = Path(get_paths()["stdlib"]) / name
        if path.is_file():
            yield f"Python's {name}", path.read_text(encoding="utf-8", errors="replace")
    for distribution in distributions():
        for file in distribution.files or ():
            path = Path(str(file.locate()))
            if path.name.upper().startswith(("LICENSE", "NOTICE", "COPYING")) and path.is_file():
                yield f"the licence of {distribution.metadata['Name']}", path.read_text(errors="replace")


def read_bytes() -> tuple[str, torch.Tensor]:
    """Return where the text is from and its bytes as one int64 tensor (length,)."""
    names, data = [], b""
    for name, text in texts():
        names.append(name)
        data += text.encode()
        if len(data) >= LEAST_BYTES:
            break
    if len(data) < LEAST_BYTES:
        raise FileNotFoundError(f"found only {len(data)} bytes of text on this machine, need {LEAST_BYTES}")
    return " and ".join(names), torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def small_gpt2() -> nn.Module:
    """Return a GPT-2 of two layers over the 256 byte values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=96, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def train(steps: int = 20, seed: int = 0) -> tuple[str, list[float]]:
    """Train for ``steps`` batches and return where the text is from and the loss of each, in nats a byte.

    Raises:
        Mismatch: Logits, loss or a gradient are not float32, or the loss is not finite or did not fall.
    """
    torch.manual_seed(seed)
    source, data = read_bytes()
    model = small_gpt2()
    # Nobody reads the cache in float32, so it is left as the forward made it.
    wrapped = lite_ext.setup_module(model, "bf16-mixed", skip_outputs=("cache", "past_key_values"))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        window = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
        logits = wrapped(input_ids=window[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        check_float32("logits", logits)
        check_float32("loss", loss)
        losses.append(loss.item())
    for name, parameter in wrapped.named_parameters():
        if parameter.grad is None:
            raise Mismatch(f"{name} has no gradient")
        check_float32(f"gradient of {name}", parameter.grad)
    check_falls(losses)
    return source, losses


def check_float32(name: str, tensor: torch.Tensor) -> None:
    """Raise ``Mismatch`` unless ``tensor`` is float32."""
    if tensor.dtype is not torch.float32:
        raise Mismatch(f"{name}: expected torch.float32, got {tensor.dtype}")


def check_falls(losses: list[float]) -> None:
    """Raise ``Mismatch`` unless ``losses`` are finite and the last quarter is well below the first."""
    if not all(map(math.isfinite, losses)):
        raise Mismatch(f"a loss is not finite: {losses}")
    quarter = max(1, len(losses) // 4)
    first, last = mean(losses[:quarter]), mean(losses[-quarter:])
    if not last < 0.9 * first:
        raise Mismatch(f"the loss did not fall by a tenth: {first:.3f} at the start, {last:.3f} at the end")
