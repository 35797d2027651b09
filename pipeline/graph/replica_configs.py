"""The replicas of a run: its config once for each seed, and for each class order.

A replica is an ordinary config with one seed. It has the name and the keys of the same config run
on its own: replica `seed-1` of run `table` is the run `table-seed-1`, as `--set seed=1` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.settings import Config, StreamSettings
from workers.errors import UserError


def replica_configs(config: Config) -> dict[str, Config]:
    """Return the configs with one seed and one class order each, by the name of the replica.

    The result is empty for a config with one seed and one order.
    """
    if not config.seeds and not config.orders:
        return {}
    seeds = config.seeds or (config.seed,)
    configs = {}
    for order in config.orders or ("",):
        for seed in seeds:
            name = _replica_name(config, order, seed)
            configs[name] = config.model_copy(
                update={
                    "name": f"{config.name}-{name}",
                    "seed": seed,
                    "seeds": (),
                    "orders": (),
                    "stream": _in_order(config.stream, order),
                }
            )
    return configs


def refuse_replicas(config: Config, where: str, needs: str) -> None:
    """Check that a config has one seed and one class order.

    Args:
        config: The config.
        where: Path of the config, for the message.
        needs: What the command works with, for example `one model`.

    Raises:
        UserError: If it has several.
    """
    replicas = replica_configs(config)
    if not replicas:
        return
    remedies = []
    if config.seeds:
        remedies.append(f"--set seed={config.seeds[0]}")
    if config.orders:
        remedies.append("a config without `orders`")
    raise UserError(
        f"{where} is a run of {len(replicas)} replicas ({', '.join(replicas)}), and {needs}; "
        f"choose one with {' and '.join(remedies)}"
    )


def _replica_name(config: Config, order: str, seed: int) -> str:
    """Return `seed-1`, `order1` or `order1-seed-1`, without parts that the run does not vary."""
    parts = []
    if order:
        parts.append(_order_name(config.orders, order))
    if config.seeds:
        parts.append(f"seed-{seed}")
    return "-".join(parts)


def _order_name(orders: Sequence[str], order: str) -> str:
    """Return the name of a class order, without its card if no other order has that name."""
    stems = [other.rpartition("/")[2] for other in orders]
    stem = order.rpartition("/")[2]
    name = stem if stems.count(stem) == 1 else order.replace("/", "-")
    return f"order-{name}" if name.isdigit() else name


def _in_order(stream: StreamSettings, order: str) -> StreamSettings:
    """Return a stream with an order of the classes of divided tasks; empty: unchanged."""
    if not order:
        return stream
    entries = []
    for entry in stream.tasks:
        if entry.split:
            entry = entry.model_copy(update={"order": order})
        entries.append(entry)
    return stream.model_copy(update={"tasks": tuple(entries)})
