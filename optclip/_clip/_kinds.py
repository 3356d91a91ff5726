"""Which clip it is: of norms, of single elements, of singular values."""

from typing import Any

from optclip._arrays import _validate
from optclip._clip._clip import Clip, ScalingClip
from optclip._clip._elements import ElementClip
from optclip._clip._singular_values import spectrum_clip
from optclip.norms._norm import Norm
from optclip.norms._spectral import Spectral
from optclip.responses import Response
from optclip.scopes._matrices import SingularValues
from optclip.scopes._scope import Element, Scope


def clip_of(
    scope: Scope, norm: Norm, response: Response, eps: Any, strict: bool, *rest: Any
) -> Clip[Any, Any]:
    """The clip of its kind, its arguments checked."""
    is_of_matrices = isinstance(scope, SingularValues) or isinstance(norm, Spectral)
    if is_of_matrices and strict:
        advice = (
            "Elements are rounded one by one, which can make a singular value larger."
        )
        raise ValueError(_validate.must_be("strict", "False", strict, advice))
    if isinstance(scope, SingularValues):
        return spectrum_clip(scope, norm, response, eps, strict, *rest)
    moves = isinstance(scope, Element) and hasattr(response, "element")
    kind = ElementClip if moves else ScalingClip
    return kind(scope, norm, response, eps, strict, *rest)
