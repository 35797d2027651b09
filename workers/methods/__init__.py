"""The registry: one line per method."""

from workers.methods.adapter import Adapter
from workers.methods.apd import Apd
from workers.methods.base import Method
from workers.methods.bic import Bic
from workers.methods.ctr import CtrTsm
from workers.methods.ctr_full import CtrFull
from workers.methods.der import Der
from workers.methods.der_p import DerP
from workers.methods.dytox import DyTox
from workers.methods.e2e import E2e
from workers.methods.ewc import Ewc
from workers.methods.finetune import FineTune
from workers.methods.hat import AdaHat, Hat
from workers.methods.icarl import Icarl
from workers.methods.individual import Individual
from workers.methods.joint import Joint
from workers.methods.ksm import Ksm
from workers.methods.linear import Linear
from workers.methods.lora import Lora
from workers.methods.lwf import Lwf
from workers.methods.meat import Meat
from workers.methods.packnet import PackNet
from workers.methods.piggyback import Piggyback
from workers.methods.podnet import PodNet
from workers.methods.replay import Replay
from workers.methods.rpsnet import Rpsnet
from workers.methods.simple_der import SimpleDer
from workers.methods.supsup import SupSup
from workers.methods.supsup_nn import SupSupNN
from workers.methods.tfm import Tfm
from workers.methods.toast import Toast, ToastLite
from workers.methods.ucir import Ucir
from workers.methods.vpt import Vpt
from workers.methods.wa import Wa
from workers.methods.wsn import Wsn

METHODS: dict[str, type[Method]] = {
    m.name: m
    for m in (
        AdaHat,
        Adapter,
        Apd,
        Bic,
        CtrFull,
        CtrTsm,
        Der,
        DerP,
        DyTox,
        E2e,
        Ewc,
        FineTune,
        Hat,
        Icarl,
        Individual,
        Joint,
        Ksm,
        Linear,
        Lora,
        Lwf,
        Meat,
        PackNet,
        Piggyback,
        PodNet,
        Replay,
        Rpsnet,
        SimpleDer,
        SupSup,
        SupSupNN,
        Tfm,
        Toast,
        ToastLite,
        Ucir,
        Vpt,
        Wa,
        Wsn,
    )
}
