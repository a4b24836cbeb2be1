"""The device plugin: serves each resource to the kubelet over gRPC."""
