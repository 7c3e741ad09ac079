"""Types of the fields of a config.json: what is larger is damaged, or an attack."""

from typing import Annotated

from msgspec import Meta

WHERE = "config.json"

# No dimension of a model is larger; keeps products far from overflow.
Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
Experts = Annotated[int, Meta(ge=1, le=4096)]
MaskId = Annotated[int, Meta(ge=0, le=1 << 24)]
BlockSize = Annotated[int, Meta(ge=2, le=64)]
LayerNumber = Annotated[int, Meta(ge=0, le=1024)]
Epsilon = Annotated[float, Meta(ge=1e-12, le=1.0)]
# Wide of everything published, and so narrow that no table of angles overflows or divides by zero.
Theta = Annotated[float, Meta(ge=1.001, le=1e12)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
# Factors of embeddings, residuals, logits; caps.
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
