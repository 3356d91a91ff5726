"""Clip cotangents inside the backward pass; the forward pass is unchanged.

Public names: `optclip.clip_cotangent`, `optclip.with_clipped_cotangent` and
`optclip.cotangent_probe`.
"""
