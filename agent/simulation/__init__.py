"""A GPU node without a GPU: the simulated driver library, an emulated kubelet, scenarios, and the demo."""
