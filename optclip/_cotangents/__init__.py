"""Clip cotangents inside the backward pass; the forward pass is unchanged.

Public names: `optclip.clip_cotangent` and `optclip.cotangent_probe`.
"""
