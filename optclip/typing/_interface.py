"""Names of `typing` that other packages of optclip use, besides the public ones."""

from optclip.typing._states import is_cotangent_record as is_cotangent_record
