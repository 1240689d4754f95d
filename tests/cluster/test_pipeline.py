"""The compiled pipeline's containers on a real cluster."""

from __future__ import annotations

from steadytrain.components.shared.attached import MOUNT_PATH

from support.cluster import volume, volume_mount


def test_pods_share_the_volume(cluster, step_image):
    container = {"image": step_image, "command": ["sh", "-c", f"echo here > {MOUNT_PATH}/found"]}
    cluster.run("writer", container, volumes=[volume()], mounts=[volume_mount()])
    assert cluster.read(f"{MOUNT_PATH}/found") == "here\n"
