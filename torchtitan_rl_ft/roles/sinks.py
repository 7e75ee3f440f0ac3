"""TensorBoard and W&B of a run, as TorchTitan's section [metrics] says."""

from __future__ import annotations

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.observability.events import EventSink
from torchtitan_rl_ft.observability.metric_sinks import Follower, MetricSink, MetricSinks


def sinks_of(resolved: Resolved, events: EventSink) -> MetricSinks:
    """Started; nothing when neither is enabled. Their libraries are imported in the side thread."""
    folder, log_freq = resolved.run_folder, int(resolved.get("metrics.log_freq"))
    followers: dict[str, Follower] = {}
    if resolved.get("metrics.enable_tensorboard"):
        tensorboard = folder.path / str(resolved.get("metrics.save_tb_folder"))

        def tensorboard_sink() -> MetricSink:
            from torchtitan_rl_ft.observability.tensorboard_sink import TensorBoardSink

            return TensorBoardSink(tensorboard)

        cursor = tensorboard / ".written.json"
        followers["TensorBoard"] = Follower(folder.metrics, cursor, tensorboard_sink, log_freq)
    if resolved.get("metrics.enable_wandb"):

        def wandb_sink() -> MetricSink:
            from torchtitan_rl_ft.observability.wandb_sink import WandbSink

            return WandbSink(folder.path, resolved.values)

        cursor = folder.path / "wandb" / ".written.json"
        followers["W&B"] = Follower(folder.metrics, cursor, wandb_sink, log_freq)
    sinks = MetricSinks(followers, events)
    sinks.start()
    return sinks
