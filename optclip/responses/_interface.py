"""Export the parts of `responses` that other packages of optclip use."""

from optclip.responses._response_argument import BY_NAME as BY_NAME
from optclip.responses._response_argument import ResponseLike as ResponseLike
from optclip.responses._response_argument import at_step as at_step
from optclip.responses._response_argument import compares_norms as compares_norms
from optclip.responses._response_argument import is_builtin as is_builtin
from optclip.responses._response_argument import is_same_always as is_same_always
from optclip.responses._response_argument import resolve as resolve
