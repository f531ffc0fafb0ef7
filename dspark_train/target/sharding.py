"""A target whose layers are shared out over processes, and gathered one by one as they work."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dspark_train import ranks
from dspark_train.target.model import Target


def shard(target: Target) -> None:
    """Keep of every decoder layer only this process's part (FSDP2); embedding and head stay whole.

    From now on a pass is one of all processes together: each may read other tokens, but all must
    make the same number of passes.

    Raises:
        ValueError: there is one process only, or the weights are packed.
    """
    if ranks.world_size() == 1:
        raise ValueError(
            "capture.target_sharding=fsdp2 shares a target out over processes, and there is one: "
            "start several by torchrun or accelerate, or take replicated"
        )
    if target.packed:
        raise ValueError(
            "capture.target_sharding=fsdp2 cannot share out weights that are packed for a CPU: "
            "take target.pack=false"
        )
    ranks.join()
    mesh = init_device_mesh(target.device.type, (ranks.world_size(),))
    for layer in target.layers:
        # each is a root of its own, which by default would stay gathered after its first pass
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    target.sharded = True
