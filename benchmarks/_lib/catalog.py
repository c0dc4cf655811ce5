"""Every lane by name: what is compared, in words and in classes."""

from _lib.lanes import LaneSpec

__all__ = ["ARENA_LANES", "PEER_LANES"]

ARENA_LANES = tuple(
    LaneSpec(
        name=f"bare_arena_{threads}t",
        title=f"bare persistent arena, copy on {threads} thread{'s' * (threads > 1)}",
        module="_lib.peers_shared",
        publisher="ArenaPublisher",
        consumer="ArenaConsumer",
        options={"threads": threads},
    )
    for threads in (1, 2)
)

PEER_LANES = (
    LaneSpec(
        name="safetensors_shm",
        title="safetensors through /dev/shm",
        module="_lib.peers_files",
        publisher="SafetensorsPublisher",
        consumer="SafetensorsConsumer",
    ),
    LaneSpec(
        name="torch_mp_alias",
        title="torch.multiprocessing, shared tensors as they are",
        module="_lib.peers_shared",
        publisher="QueuePublisher",
        consumer="QueueConsumer",
        options={"queue": True},
    ),
    LaneSpec(
        name="torch_mp_clone",
        title="torch.multiprocessing, a clone per update",
        module="_lib.peers_shared",
        publisher="QueuePublisher",
        consumer="QueueConsumer",
        options={"queue": True, "clone": True},
    ),
    LaneSpec(
        name="shm_per_tensor_reused",
        title="one shared_memory segment per tensor, reused",
        module="_lib.peers_shared",
        publisher="SegmentPublisher",
        consumer="SegmentConsumer",
    ),
    LaneSpec(
        name="shm_per_tensor_fresh",
        title="one shared_memory segment per tensor, new each time",
        module="_lib.peers_shared",
        publisher="SegmentPublisher",
        consumer="SegmentConsumer",
        options={"fresh": True},
    ),
    LaneSpec(
        name="torch_save_load",
        title="torch.save and torch.load through /dev/shm",
        module="_lib.peers_files",
        publisher="TorchSavePublisher",
        consumer="TorchSaveConsumer",
    ),
    LaneSpec(
        name="torch_save_load_mmap",
        title="torch.save and torch.load(mmap=True) through /dev/shm",
        module="_lib.peers_files",
        publisher="TorchSavePublisher",
        consumer="TorchSaveConsumer",
        options={"mmap": True},
    ),
    LaneSpec(
        name="ray_zero_copy",
        title="Ray object store, zero-copy tensors",
        module="_lib.peer_ray",
        publisher="RayPublisher",
        consumer="RayConsumer",
        environment={"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"},
        requires="ray",
        install_hint="pip install ray",
    ),
)
