"""The registry: one line per method."""

from workers.methods.base import Method
from workers.methods.finetune import FineTune
from workers.methods.individual import Individual
from workers.methods.joint import Joint
from workers.methods.linear import Linear
from workers.methods.meat import Meat

METHODS: dict[str, type[Method]] = {m.name: m for m in (FineTune, Individual, Joint, Linear, Meat)}
