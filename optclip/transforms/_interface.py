"""Names of `transforms` that other packages of optclip use, besides the public ones."""

from optclip.transforms._clip_by_transform import clip_by as clip_by
from optclip.transforms._engine import Engine as Engine
from optclip.transforms._lift import lifted as lifted
from optclip.transforms._param_placeholder import is_placeholder as is_placeholder
from optclip.transforms._positions import checks_positions as checks_positions
from optclip.transforms._rules import Rules as Rules
from optclip.transforms._rules import rules_of as rules_of
from optclip.transforms._state import check_record as check_record
