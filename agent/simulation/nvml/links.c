/* NVLinks, the PCIe topology, and the fabric of NVSwitches. */
#define _GNU_SOURCE
#include <string.h>

#include "client.h"

#define ENTER_LINK(name)                                                                                     \
    ENTER_DEVICE(name, device);                                                                              \
    if (!number(gpu->links)) return RC_NOT_SUPPORTED;                                                        \
    REQUIRE(link < number(gpu->links))

API int nvmlDeviceGetNvLinkState(handle_t device, unsigned int link, unsigned int *out) {
    ENTER_LINK(nvmlDeviceGetNvLinkState);
    return answer_number(gpu->link_state + link, out);
}

/* The peer is kept as domain << 32 | bus << 16 | device; what is no GPU of this node is an NVSwitch. */
static unsigned int peer_of(const struct gpu_config *gpu, unsigned int link, abi_pci_t *out) {
    uint64_t peer = number(gpu->link_peer + link);
    for (int other = 0; other < gpu_count(); other++) {
        const struct gpu_config *at = gpu_config(other);
        if ((number(at->pci_domain) << 32 | number(at->pci_bus) << 16 | number(at->pci_device)) == peer) {
            pci_of(at, out);
            return ABI_LINK_TO_GPU;
        }
    }
    fill_pci(out, peer >> 32, (peer >> 16) & 0xffff, peer & 0xffff, number(gpu->switch_device_id), 0);
    return ABI_LINK_TO_SWITCH;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(handle_t device, unsigned int link, unsigned int *out) {
    ENTER_LINK(nvmlDeviceGetNvLinkRemoteDeviceType);
    REQUIRE(out);
    abi_pci_t pci;
    *out = peer_of(gpu, link, &pci);
    return RC_SUCCESS;
}

#define ANSWER_PEER(name, length)                                                                            \
    API int name(handle_t device, unsigned int link, void *out) {                                            \
        ENTER_LINK(name);                                                                                    \
        REQUIRE(out);                                                                                        \
        abi_pci_t pci;                                                                                       \
        peer_of(gpu, link, &pci);                                                                            \
        memcpy(out, &pci, length);                                                                           \
        return RC_SUCCESS;                                                                                   \
    }
ANSWER_PEER(nvmlDeviceGetNvLinkRemotePciInfo, offsetof(abi_pci_t, busId))
ANSWER_PEER(nvmlDeviceGetNvLinkRemotePciInfo_v2, sizeof(abi_pci_t))

static bool shared(const uint64_t *one, const uint64_t *other) {
    return number(one) == number(other) && number(one) != NODE_UNSUPPORTED;
}

static unsigned int common_ancestor(int one, int other) {
    const struct gpu_config *a = gpu_config(one), *b = gpu_config(other);
    if (one == other) return ABI_TOPOLOGY_INTERNAL;
    if (shared(a->pcie_switch, b->pcie_switch)) return ABI_TOPOLOGY_MULTIPLE;
    if (shared(a->host_bridge, b->host_bridge)) return ABI_TOPOLOGY_HOSTBRIDGE;
    return shared(a->numa_node, b->numa_node) ? ABI_TOPOLOGY_NODE : ABI_TOPOLOGY_SYSTEM;
}

API int nvmlDeviceGetTopologyCommonAncestor(handle_t device, handle_t second, unsigned int *out) {
    ENTER_DEVICE(nvmlDeviceGetTopologyCommonAncestor, device);
    (void)gpu;
    struct target other = resolve(second);
    REQUIRE(out && other.kind == DEVICE);
    int code = answer_code(node_current(), FN_nvmlDeviceGetTopologyCommonAncestor, other.gpu);
    if (!code) *out = common_ancestor(at.gpu, other.gpu);
    return code;
}

static int fill_fabric(const struct gpu_config *gpu, abi_fabric_v3_t *out) {
    unsigned int state, status;
    int code = answer_number(gpu->fabric_state, &state);
    if (code) return code;
    code = answer_number(gpu->fabric_status, &status);
    if (code) return code;
    for (int byte = 0; byte < 16; byte++)
        out->clusterUuid[byte] = (unsigned char)(number(gpu->fabric_cluster + byte / 8) >> (56 - byte % 8 * 8));
    out->status = (int)status;
    out->cliqueId = (unsigned int)number(gpu->fabric_clique);
    out->state = (unsigned char)state;
    out->healthMask = (unsigned int)number(gpu->fabric_health_mask);
    out->healthSummary = (unsigned char)number(gpu->fabric_health_summary);
    return RC_SUCCESS;
}

API int nvmlDeviceGetGpuFabricInfo(handle_t device, abi_fabric_t *out) {
    ENTER_DEVICE(nvmlDeviceGetGpuFabricInfo, device);
    REQUIRE(out);
    abi_fabric_v3_t full = {0};
    int code = fill_fabric(gpu, &full);
    if (code) return code;
    memcpy(out->clusterUuid, full.clusterUuid, sizeof out->clusterUuid);
    out->status = full.status;
    out->cliqueId = full.cliqueId;
    out->state = full.state;
    return RC_SUCCESS;
}

API int nvmlDeviceGetGpuFabricInfoV(handle_t device, abi_fabric_v3_t *out) {
    ENTER_DEVICE(nvmlDeviceGetGpuFabricInfoV, device);
    REQUIRE(out);
    bool second = out->version == ABI_VERSION(abi_fabric_v2_t, 2);
    if (!second && out->version != ABI_VERSION(abi_fabric_v3_t, 3)) return RC_ARGUMENT_VERSION_MISMATCH;
    abi_fabric_v3_t full = {.version = out->version};
    int code = fill_fabric(gpu, &full);
    /* Version 2 is version 3 without its last byte. */
    if (!code) memcpy(out, &full, second ? offsetof(abi_fabric_v3_t, healthSummary) : sizeof full);
    return code;
}
