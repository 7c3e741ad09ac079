"""Integers of 8 bits, symmetric, and of 4 bits, symmetric or affine, with scales."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from clocher_kernels.dtypes import look_up, to_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import base
from clocher_kernels.formats.base import Format, Plane, Planes, Shape


@dataclass(frozen=True, repr=False)
class Int8(Format):
    """value = code * scale, symmetric.

    Planes:
        codes: i8 [..., N, K]. The encoder gives -127..127; -128 is decoded like any other.
        scales: f32, f16 or bf16; [..., 1], [..., N] or [..., N, ceil(K/G)].

    Encoding: scale = absmax / 127, rounded to its stored type; code = rint(value / scale) with ties
    to even, clipped to +-127. The error of an element is at most half a scale while the scale is a
    normal number of its type.

    Attributes:
        group: "tensor", "row" or the group length along K.
        scale_dtype: "f32", "f16" or "bf16".
    """

    group: base.Group
    scale_dtype: str

    def __post_init__(self) -> None:
        base.check_scale_dtype(self.name, self.scale_dtype)
        if isinstance(self.group, int) and self.group < 1:
            raise FormatError(f"{self.name}: group {self.group}; expected at least 1")

    @property
    def name(self) -> str:
        """Canonical name: "int8_row_f32", "int8_g32_f16"."""
        return f"int8_{base.spell(self.group)}_{self.scale_dtype}"

    def planes(self, shape: Shape) -> dict[str, Plane]:
        base.matrix_shape(self.name, shape)
        return {
            "codes": Plane("i8", shape),
            "scales": Plane(self.scale_dtype, base.scales_shape(self.group, shape)),
        }

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        base.matrix_shape(self.name, values.shape)
        base.require_finite(self.name, values)
        ideal = base.absmax(base.split(values, self.group)) / np.float32(127)
        return self.encode_with(values, base.store(self.name, ideal, self.scale_dtype)[0])

    def encode_with(self, values: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
        """Encode with scales as they are stored, which were chosen elsewhere."""
        step = to_f32(scales, self.scale_dtype)
        steps = base.split(values, self.group) / step[..., None]
        np.rint(steps, out=steps)
        np.clip(steps, -127, 127, out=steps)
        return {"codes": base.join(steps.astype(np.int8), values.shape), "scales": scales}

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        cells = base.split(planes["codes"].astype(np.float32), self.group)
        cells *= to_f32(planes["scales"], self.scale_dtype)[..., None]
        return base.join(cells, shape)

    def check(self, planes: Planes, shape: Shape) -> None:
        base.check_scales(self.name, planes["scales"], self.scale_dtype)


_BYTES = np.arange(256)
_NIBBLES = np.stack([_BYTES & 15, _BYTES >> 4], axis=1).astype(np.float32)


@dataclass(frozen=True, repr=False)
class Int4(Format):
    """value = (code - 8) * scale if symmetric, (code - zero) * scale if not; codes 0..15.

    Planes:
        codes: u8 [..., N, ceil(K/2)]; the low nibble is the even index. For odd K the last high
            nibble is the code of the value zero.
        scales: f32, f16 or bf16 [..., N] or [..., N, ceil(K/G)]. Symmetric ones may be negative.
        zeros: u8 of the shape of the scales, 0..15; only if not symmetric.

    Symmetric encoding: the element of largest magnitude (the positive one of two) becomes -8, as in
    ggml's Q4_0, so scale = element / -8 and all 16 codes are used. The error of an element is at
    most half a step, or 1.04 steps for elements of the other sign beyond 7.5 steps.
    Affine encoding: scale = (max - min) / 15 of the group's range widened to include zero, zero =
    rint(-min / scale). The error is at most 0.56 of a step.
    Scales are rounded to their stored type before the codes are chosen; ties go to even. The bounds
    include the rounding of a bf16 scale and hold while the scale is a normal number of its type.

    Attributes:
        symmetric: whether the code of zero is 8 everywhere.
        group: "row" or the group length along K, even.
        scale_dtype: "f32", "f16" or "bf16".
    """

    symmetric: bool
    group: int | Literal["row"]
    scale_dtype: str

    def __post_init__(self) -> None:
        base.check_scale_dtype(self.name, self.scale_dtype)
        if isinstance(self.group, int) and (self.group < 2 or self.group % 2):
            raise FormatError(f"{self.name}: group {self.group}; expected an even number")

    @property
    def name(self) -> str:
        """Canonical name: "int4_sym_g64_f16", "int4_asym_row_bf16"."""
        kind = "sym" if self.symmetric else "asym"
        return f"int4_{kind}_{base.spell(self.group)}_{self.scale_dtype}"

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = base.matrix_shape(self.name, shape)
        scales = base.scales_shape(self.group, shape)
        planes = {
            "codes": Plane("u8", (*lead, n, -(-k // 2))),
            "scales": Plane(self.scale_dtype, scales),
        }
        if not self.symmetric:
            planes["zeros"] = Plane("u8", scales)
        return planes

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        base.matrix_shape(self.name, values.shape)
        base.require_finite(self.name, values)
        cells = base.split(values, self.group)
        low, high = cells.min(axis=-1), cells.max(axis=-1)
        if self.symmetric:
            ideal = np.where(-low > high, low, high) / np.float32(-8)
        else:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            # Divided before the difference, which could overflow.
            ideal = high / np.float32(15) - low / np.float32(15)
        scales, step = base.store(self.name, ideal, self.scale_dtype)
        if self.symmetric:
            return self.encode_with(values, scales)
        zeros = np.clip(np.rint(-low / step), 0, 15).astype(np.uint8)
        return self.encode_with(values, scales, zeros)

    def encode_with(
        self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Encode with scales and zero points as they are stored, which were chosen elsewhere."""
        step = to_f32(scales, self.scale_dtype)
        steps = base.split(values, self.group) / step[..., None]
        np.rint(steps, out=steps)
        steps += np.float32(8) if zeros is None else zeros[..., None]
        np.clip(steps, 0, 15, out=steps)
        return self.pack(base.join(steps.astype(np.uint8), values.shape), scales, zeros)

    def pack(
        self, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return the planes of codes that were chosen elsewhere.

        Args:
            codes: [..., N, K] u8, 0..15, one a byte.
            scales: as stored, [..., N] or [..., N, ceil(K/G)].
            zeros: u8 of the shape of the scales; only if not symmetric.
        """
        if codes.shape[-1] % 2:
            if zeros is None:
                last = np.full_like(codes[..., :1], 8)
            else:
                last = zeros[..., None] if self.group == "row" else zeros[..., -1:]
            codes = np.concatenate([codes, last], axis=-1)
        planes = {"codes": codes[..., 0::2] | codes[..., 1::2] << 4, "scales": scales}
        if zeros is not None:
            planes["zeros"] = zeros
        return planes

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        *lead, n, k = shape
        steps = look_up(_NIBBLES, planes["codes"]).reshape(*lead, n, -1)[..., :k]
        cells = base.split(steps, self.group)
        cells -= np.float32(8) if self.symmetric else planes["zeros"][..., None].astype(np.float32)
        cells *= to_f32(planes["scales"], self.scale_dtype)[..., None]
        return base.join(cells, shape)

    def check(self, planes: Planes, shape: Shape) -> None:
        base.check_scales(self.name, planes["scales"], self.scale_dtype)
        if not self.symmetric and planes["zeros"].max() > 15:
            raise FormatError(
                f"{self.name}: a zero point of {planes['zeros'].max()}; expected 0..15; "
                "the file is damaged or was written by another program"
            )
