"""A perceptron by Keras, which JAX or TensorFlow computes. Keras is imported when one is built."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array
from steadytrain.components.tabular.learners.networks import (
    GRADIENT,
    NetworkLearner,
    embedding_size,
)
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework import Learned, LearnerTrainer
from steadytrain.components.train.framework.learner import State


class KerasLearner(NetworkLearner):
    """A step is an epoch of Keras's AdamW.

    The order of the records depends on the number of epochs alone; what dropout draws next is in
    the state.

    backend: the value of KERAS_BACKEND. A process has one.
    """

    backend: ClassVar[str]

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        keras = self._imported()
        self.read = self.inputs_of(self.matrix)
        self.network = self._network(keras)
        loss = keras.losses.MeanSquaredError()
        if self.labels:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.AdamW(
            self.rate, weight_decay=self.sizes["weight_decay"], global_clipnorm=GRADIENT
        )
        self.network.compile(self.optimizer, loss, jit_compile=self.backend == "jax")
        self.optimizer.build(self.network.trainable_variables)
        self.parameters = int(self.network.count_params())

    def inputs_of(self, matrix: Array) -> list[Any]:
        """Return what the network reads: numbers, and places of categories."""
        numbers, places = self.inputs.read(matrix)
        return [numbers, places.astype(np.int32)]

    def _imported(self) -> Any:
        """Return Keras with this backend, which computes on the CPU.

        Raises:
            BadInput: it is not installed.
        """
        for package in ("keras", self.backend):
            if importlib.util.find_spec(package) is None:
                raise BadInput(
                    f"model.framework = {self.config.model.framework!r}: {package} is not "
                    "installed",
                    remedy=self.install,
                )
        os.environ["KERAS_BACKEND"] = self.backend
        self.limit()
        keras = importlib.import_module("keras")
        # A file of the user's may say otherwise.
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        return keras

    install: ClassVar[str]

    def limit(self) -> None:
        """Make the backend use the CPU, with as many threads as this learner has."""
        raise NotImplementedError

    def _network(self, keras: Any) -> Any:
        chance = np.random.default_rng(self.seed)

        def seed() -> int:
            return int(chance.integers(2**31))

        def dense(name: str, size: int, activation: str | None = None) -> Any:
            start = keras.initializers.GlorotUniform(seed())
            return keras.layers.Dense(size, activation, kernel_initializer=start, name=name)

        inputs = [keras.Input((each.shape[1],), dtype=each.dtype.name) for each in self.read]
        parts = [inputs[0]]
        for index, count in enumerate(self.inputs.counts):
            start = keras.initializers.RandomUniform(seed=seed())
            size = embedding_size(count)
            layer = keras.layers.Embedding(count + 1, size, start, name=f"embedding{index}")
            parts.append(layer(inputs[1][:, index]))
        hidden = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
        for layer in range(int(self.sizes["layers"])):
            hidden = dense(f"layer{layer}", int(self.sizes["width"]), "relu")(hidden)
            hidden = keras.layers.Dropout(self.sizes["dropout"], seed=seed())(hidden)
        return keras.Model(inputs, dense("head", max(1, len(self.labels)))(hidden))

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        rate = self.rate * learning_rate_scale
        self.optimizer.learning_rate = rate
        order = np.random.default_rng([self.seed, self.epochs]).permutation(len(self.targets))
        weights = None if self.row_weights is None else self.row_weights[order].astype(np.float32)
        aims = self.aims[order].astype(np.int32 if self.labels else np.float32)
        fitted = self.network.fit(
            [each[order] for each in self.read],
            aims,
            batch_size=self.batch,
            sample_weight=weights,
            shuffle=False,
            verbose=0,
        )
        self.epochs += 1
        return Learned(float(fitted.history["loss"][0]) * self.scale, rate)

    def trained(self) -> dict[str, Any]:
        weights = dict[str, Any]()
        for index in range(len(self.inputs.counts)):
            (weights[f"embedding{index}"],) = self.network.get_layer(
                f"embedding{index}"
            ).get_weights()
        for layer in range(int(self.sizes["layers"])):
            weight, bias = self.network.get_layer(f"layer{layer}").get_weights()
            weights |= {f"weight{layer}": weight, f"bias{layer}": bias[None]}
        weight, bias = self.network.get_layer("head").get_weights()
        return weights | {"head": weight[None], "head_bias": bias[None]}

    def _variables(self) -> Iterator[tuple[str, Any]]:
        """Yield what `learn` changes: weights, what dropout draws next, and moments."""
        for owner in ("network", "optimizer"):
            for index, variable in enumerate(getattr(self, owner).variables):
                yield f"{owner} {index}", variable

    def state(self) -> State:
        convert = importlib.import_module("keras").ops.convert_to_numpy
        arrays = {name: np.array(convert(variable)) for name, variable in self._variables()}
        # A checkpoint holds no unsigned numbers of 32 bits, which seeds are.
        return {
            name: array.astype(np.int64) if array.dtype.kind == "u" else array
            for name, array in arrays.items()
        } | {"epochs": np.array(self.epochs)}

    def restore(self, state: State) -> None:
        self.epochs = int(state["epochs"])
        for name, variable in self._variables():
            variable.assign(np.asarray(state[name]).astype(variable.dtype))


class JaxLearner(KerasLearner):
    """JAX compiles the network."""

    backend = "jax"
    install = (
        'install it: pip install "steadytrain[keras]", or use the image steadytrain/train-keras'
    )

    def limit(self) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # XLA's pool of threads has this size.
        os.environ["NPROC"] = str(self.threads)


class TensorFlowLearner(KerasLearner):
    """TensorFlow computes the network, with operations that give the same bits each time."""

    backend = "tensorflow"
    install = (
        'install it in an environment of its own: pip install "steadytrain[tensorflow]", or use '
        "the image steadytrain/train-keras"
    )

    def limit(self) -> None:
        # The order of sums in oneDNN depends on the processor.
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        tensorflow = importlib.import_module("tensorflow")
        tensorflow.config.set_visible_devices([], "GPU")
        threads = tensorflow.config.threading
        if threads.get_intra_op_parallelism_threads() != self.threads:
            threads.set_intra_op_parallelism_threads(self.threads)
            threads.set_inter_op_parallelism_threads(1)
        tensorflow.config.experimental.enable_op_determinism()


JAX: Final = LearnerTrainer(JaxLearner)
TENSORFLOW: Final = LearnerTrainer(TensorFlowLearner)
