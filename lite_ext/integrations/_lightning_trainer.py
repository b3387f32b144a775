"""The plugin for Lightning's ``Trainer``, apart because ``lightning.pytorch`` takes long to import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lite_ext.dtypes import skip_names
from lite_ext.integrations.lightning import InputConversion, _default_device, _name
from lite_ext.precision import Precision as Meaning

__all__ = ["TrainerPrecision"]


class TrainerPrecision(InputConversion, Precision):
    """A precision plugin for ``lightning.pytorch.Trainer``; its loops convert batches only, and never an output.

    Args:
        precision: A name such as ``"bf16-true"``. As with Lightning's own plugins, the batch is converted for the
            ``*-true`` precisions only: for the mixed ones autocast does what is needed.
        skip_inputs: Keys and fields of the batch that are not converted.
        device: The device type of autocast, ``"cpu"`` or ``"cuda"``; ``None``: CUDA where there is one.
        scaler: For ``"16-mixed"``: a ``torch.amp.GradScaler``; ``None``: a new one.

    Raises:
        TypeError, ValueError: As :class:`lite_ext.integrations.lightning.FusedPrecision`.

    A batch that is a frozen dataclass is converted, but Lightning refuses to move it to the device, which it does
    before: override ``transfer_batch_to_device``. There is no plugin for the Trainer's FSDP strategy.

    To convert outputs, wrap the module that your ``LightningModule`` calls: ``lite_ext.LiteModule(net)``.
    """

    def __new__(cls, precision: str | int = "32-true", *args: Any, **kwargs: Any) -> TrainerPrecision:
        """Make an instance of the class for this precision."""
        if cls is TrainerPrecision:
            cls = _CLASSES[_name(precision)]
        made: TrainerPrecision = super().__new__(cls)
        return made

    def __init__(
        self,
        precision: str | int,
        skip_inputs: Iterable[str] = (),
        *,
        device: str | None = None,
        scaler: Any = None,
    ) -> None:
        name = _name(precision)
        if not isinstance(self, _CLASSES[name]):
            raise TypeError(f"{type(self).__name__} is not for {name!r}: use or subclass {_CLASSES[name].__name__}")
        if scaler is not None and name != "16-mixed":
            raise ValueError(f"precision={name!r} does not use a scaler, found {scaler!r}")
        self._skip_inputs = skip_names(skip_inputs, "skip_inputs")
        self._input_dtype = Meaning(name).parameter_dtype
        self._set_up(name, device or _default_device(), scaler)

    def _set_up(self, name: Any, device: str, scaler: Any) -> None:
        """Run the constructor of Lightning's class."""

    def convert_input(self, data: Any) -> Any:
        """Return the batch with its floating tensors in the dtype of the parameters."""
        return data if self._input_dtype is None else self._convert(data)[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.precision!r})"


class TrainerFullPrecision(TrainerPrecision, Precision):
    """:class:`TrainerPrecision` for ``"32-true"``."""


class TrainerDoublePrecision(TrainerPrecision, DoublePrecision):
    """:class:`TrainerPrecision` for ``"64-true"``."""


class TrainerHalfPrecision(TrainerPrecision, HalfPrecision):
    """:class:`TrainerPrecision` for ``"16-true"`` and ``"bf16-true"``."""

    def _set_up(self, name: Any, device: str, scaler: Any) -> None:
        HalfPrecision.__init__(self, name)


class TrainerMixedPrecision(TrainerPrecision, MixedPrecision):
    """:class:`TrainerPrecision` for ``"16-mixed"`` and ``"bf16-mixed"``."""

    def _set_up(self, name: Any, device: str, scaler: Any) -> None:
        MixedPrecision.__init__(self, name, device, scaler)


_CLASSES: dict[str, type[TrainerPrecision]] = {
    "32-true": TrainerFullPrecision,
    "64-true": TrainerDoublePrecision,
    "16-true": TrainerHalfPrecision,
    "bf16-true": TrainerHalfPrecision,
    "16-mixed": TrainerMixedPrecision,
    "bf16-mixed": TrainerMixedPrecision,
}
