"""Responses: the coefficient of a norm and its threshold.

`_responses` defines them, and `_response_argument` converts an argument to one.
"""

from ._response_argument import (
    BY_NAME,
    Detached,
    ResponseLike,
    UserResponse,
    as_response,
    is_same_always,
    signs,
    without_schedules,
)
from ._responses import BaseResponse, Drop, Hard, Normalize, Smooth, band
