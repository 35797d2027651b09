"""The backbone, and the mechanisms from which methods are built.

`vit` builds the backbone. Most other modules hold one mechanism each, for example `masks`,
`adapters`, `heads` or `distill`.
"""
