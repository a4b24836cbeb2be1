/* The answers about MIG: devices, GPU instances, compute instances and the profiles they are made from.
 *
 * Invariants
 * - A MIG device is one row of the mig_* lists of its GPU; GPU instances are the distinct `gi` among the rows.
 * - A handle carries the generation of the configuration it came from: after MIG was reconfigured the old
 *   ones are invalid arguments.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "client.h"

enum { PROFILE_KEYS = 0x12, COMPUTE_PROFILE_KEYS = 9 }; /* NVML_GPU_INSTANCE_PROFILE_COUNT, ..COMPUTE.. */

/* Compute slices by compute instance profile; 0: never offered here. */
static const unsigned int compute_slices[COMPUTE_PROFILE_KEYS] = {1, 2, 3, 4, 7, 8, 6, 0, 0};

struct slice {
    unsigned int row, profile, gi, ci, slices, start, compute_start;
    uint64_t memory_used;
};

static unsigned int slices_of(const struct gpu_config *gpu, struct slice out[NODE_MIGS]) {
    unsigned int count;
    struct node_read read = {0};
    do {
        node_read_begin(node_current(), &read);
        count = number(gpu->mig_mode) == 1 ? (unsigned int)number(gpu->mig_count) : 0;
        if (count > NODE_MIGS) count = NODE_MIGS;
        for (unsigned int row = 0; row < count; row++)
            out[row] = (struct slice){.row = row,
                                      .profile = (unsigned int)number(gpu->mig_profile + row) % NODE_PROFILES,
                                      .gi = (unsigned int)number(gpu->mig_gi + row),
                                      .ci = (unsigned int)number(gpu->mig_ci + row),
                                      .slices = (unsigned int)number(gpu->mig_slices + row),
                                      .start = (unsigned int)number(gpu->mig_start + row),
                                      .compute_start = (unsigned int)number(gpu->mig_compute_start + row),
                                      .memory_used = number(gpu->mig_memory_used + row)};
    } while (node_read_again(node_current(), &read));
    return count;
}

static bool find_slice(const struct gpu_config *gpu, unsigned int gi, unsigned int ci, bool any_ci,
                       struct slice *out) {
    struct slice all[NODE_MIGS];
    unsigned int count = slices_of(gpu, all);
    for (unsigned int row = 0; row < count; row++)
        if (all[row].gi == gi && (any_ci || all[row].ci == ci)) {
            *out = all[row];
            return true;
        }
    return false;
}

static bool own_slice(const struct target *at, struct slice *out) {
    return find_slice(gpu_config(at->gpu), at->gi, at->ci, at->kind == GPU_INSTANCE, out);
}

static handle_t handle_of(enum kind kind, int gpu, const struct slice *slice) {
    return instance_handle(kind, gpu, number(gpu_config(gpu)->mig_generation), slice->gi,
                           kind == GPU_INSTANCE ? 0 : slice->ci);
}

/* --- MIG devices --------------------------------------------------------------------------------------- */

/* As nvidia-smi names them: 1g.10gb, and 1c.2g.20gb for a compute instance smaller than its GPU instance. */
static void profile_text(const struct gpu_config *gpu, const struct slice *slice, char *out, size_t size) {
    const char *profile = gpu->profile_name[slice->profile];
    if (slice->slices == number(gpu->profile_slices + slice->profile))
        snprintf(out, size, "%s", profile);
    else
        snprintf(out, size, "%uc.%s", slice->slices, profile);
}

int mig_text(const struct target *at, bool uuid, char *out, unsigned int length) {
    const struct gpu_config *gpu = gpu_config(at->gpu);
    struct slice slice;
    char profile[48], name[160];
    REQUIRE(own_slice(at, &slice));
    if (uuid) return answer_text(gpu->mig_uuid[slice.row], out, length);
    profile_text(gpu, &slice, profile, sizeof profile);
    snprintf(name, sizeof name, "%s MIG %s", gpu->name[0], profile);
    return answer_text(name, out, length);
}

int mig_memory(const struct target *at, uint64_t *total, uint64_t *used) {
    struct slice slice;
    REQUIRE(own_slice(at, &slice));
    *total = number(gpu_config(at->gpu)->profile_memory_mib + slice.profile) << 20;
    *used = slice.memory_used;
    return RC_SUCCESS;
}

bool mig_by_uuid(const char *uuid, handle_t *handle, int *gpu) {
    for (int slot = 0; slot < (int)number(node_current()->config.gpus); slot++) {
        const struct gpu_config *at = gpu_config(slot);
        struct slice all[NODE_MIGS];
        unsigned int count = number(at->visible) ? slices_of(at, all) : 0;
        for (unsigned int row = 0; row < count; row++)
            if (strcmp(at->mig_uuid[row], uuid) == 0) {
                *handle = handle_of(MIG_DEVICE, slot, &all[row]);
                *gpu = slot;
                return true;
            }
    }
    return false;
}

API int nvmlDeviceGetMigMode(handle_t device, unsigned int *current, unsigned int *pending) {
    ENTER_DEVICE(nvmlDeviceGetMigMode, device);
    int refused = answer_number(gpu->mig_mode, current);
    return refused ? refused : answer_number(gpu->mig_pending, pending);
}

/* "Returns zero if MIG is not supported or enabled." */
API int nvmlDeviceGetMaxMigDeviceCount(handle_t device, unsigned int *out) {
    ENTER_DEVICE(nvmlDeviceGetMaxMigDeviceCount, device);
    REQUIRE(out);
    *out = number(gpu->mig_mode) == 1 ? (unsigned int)number(gpu->mig_maximum) : 0;
    return RC_SUCCESS;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(handle_t device, unsigned int index, handle_t *out) {
    ENTER_DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, device);
    REQUIRE(out);
    if (number(gpu->mig_mode) == NODE_UNSUPPORTED) return RC_NOT_SUPPORTED;
    struct slice all[NODE_MIGS];
    if (index >= slices_of(gpu, all)) return RC_NOT_FOUND;
    *out = handle_of(MIG_DEVICE, at.gpu, &all[index]);
    return RC_SUCCESS;
}

API int nvmlDeviceIsMigDeviceHandle(handle_t device, unsigned int *out) {
    ENTER(nvmlDeviceIsMigDeviceHandle, device);
    int refused = at.kind == MIG_DEVICE ? RC_SUCCESS : whole_device(&at);
    if (refused) return refused;
    REQUIRE(out);
    *out = at.kind == MIG_DEVICE;
    return RC_SUCCESS;
}

/* Opens a function of a MIG device: `slice` is its row. */
#define ENTER_SLICE(name, expected, handle)                                                                  \
    ENTER(name, handle);                                                                                     \
    if (at.kind == UNREADABLE) return RC_UNKNOWN;                                                            \
    struct slice slice;                                                                                      \
    REQUIRE(at.kind == (expected) && own_slice(&at, &slice) && out);                                         \
    const struct gpu_config *gpu = gpu_config(at.gpu)

API int nvmlDeviceGetGpuInstanceId(handle_t device, unsigned int *out) {
    ENTER_SLICE(nvmlDeviceGetGpuInstanceId, MIG_DEVICE, device);
    (void)gpu;
    *out = slice.gi;
    return RC_SUCCESS;
}

API int nvmlDeviceGetComputeInstanceId(handle_t device, unsigned int *out) {
    ENTER_SLICE(nvmlDeviceGetComputeInstanceId, MIG_DEVICE, device);
    (void)gpu;
    *out = slice.ci;
    return RC_SUCCESS;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle_t device, handle_t *out) {
    ENTER_SLICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, MIG_DEVICE, device);
    (void)gpu;
    *out = device_handle(at.gpu);
    return RC_SUCCESS;
}

static unsigned int compute_sms(const struct gpu_config *gpu, unsigned int profile, unsigned int slices) {
    uint64_t whole = number(gpu->profile_slices + profile);
    return whole ? (unsigned int)(number(gpu->profile_sms + profile) * slices / whole) : 0;
}

static int attributes(int function, handle_t device, abi_attributes_t *out) {
    struct target at = resolve(device);
    int refused = gate(function, at.gpu);
    if (refused) return refused;
    if (at.kind != MIG_DEVICE) return at.kind == DEVICE ? RC_NOT_SUPPORTED : whole_device(&at);
    struct slice slice;
    REQUIRE(own_slice(&at, &slice) && out);
    const struct gpu_config *gpu = gpu_config(at.gpu);
    unsigned int profile = slice.profile;
    *out = (abi_attributes_t){
        .multiprocessorCount = compute_sms(gpu, profile, slice.slices),
        .sharedCopyEngineCount = (unsigned int)number(gpu->profile_copy_engines + profile),
        .sharedDecoderCount = (unsigned int)number(gpu->profile_decoders + profile),
        .sharedEncoderCount = (unsigned int)number(gpu->profile_encoders + profile),
        .sharedJpegCount = (unsigned int)number(gpu->profile_jpegs + profile),
        .sharedOfaCount = (unsigned int)number(gpu->profile_ofas + profile),
        .gpuInstanceSliceCount = (unsigned int)number(gpu->profile_slices + profile),
        .computeInstanceSliceCount = slice.slices,
        .memorySizeMB = number(gpu->profile_memory_mib + profile)};
    return RC_SUCCESS;
}

API int nvmlDeviceGetAttributes(handle_t device, abi_attributes_t *out) {
    return attributes(FN_nvmlDeviceGetAttributes, device, out);
}

API int nvmlDeviceGetAttributes_v2(handle_t device, abi_attributes_t *out) {
    return attributes(FN_nvmlDeviceGetAttributes_v2, device, out);
}

/* --- profiles ------------------------------------------------------------------------------------------ */

/* The row of the profile whose `column` says `value`, or NODE_PROFILES. */
static unsigned int profile_by(const struct gpu_config *gpu, const uint64_t *column, uint64_t value) {
    unsigned int count = (unsigned int)number(gpu->profiles);
    for (unsigned int row = 0; row < count && row < NODE_PROFILES; row++)
        if (number(column + row) == value) return row;
    return NODE_PROFILES;
}

static void fill_profile(const struct gpu_config *gpu, unsigned int row, abi_gi_profile_v3_t *out) {
    *out = (abi_gi_profile_v3_t){.id = (unsigned int)number(gpu->profile_id + row),
                                 .sliceCount = (unsigned int)number(gpu->profile_slices + row),
                                 .instanceCount = (unsigned int)number(gpu->profile_instances + row),
                                 .multiprocessorCount = (unsigned int)number(gpu->profile_sms + row),
                                 .copyEngineCount = (unsigned int)number(gpu->profile_copy_engines + row),
                                 .decoderCount = (unsigned int)number(gpu->profile_decoders + row),
                                 .encoderCount = (unsigned int)number(gpu->profile_encoders + row),
                                 .jpegCount = (unsigned int)number(gpu->profile_jpegs + row),
                                 .ofaCount = (unsigned int)number(gpu->profile_ofas + row),
                                 .memorySizeMB = number(gpu->profile_memory_mib + row)};
    snprintf(out->name, sizeof out->name, "MIG %s", gpu->profile_name[row]);
}

#define ENTER_PROFILE(name)                                                                                  \
    ENTER_DEVICE(name, device);                                                                              \
    REQUIRE(key < PROFILE_KEYS && out);                                                                      \
    unsigned int row = profile_by(gpu, gpu->profile_key, key);                                               \
    if (row == NODE_PROFILES) return RC_NOT_SUPPORTED;                                                       \
    abi_gi_profile_v3_t full;                                                                                \
    fill_profile(gpu, row, &full)

API int nvmlDeviceGetGpuInstanceProfileInfo(handle_t device, unsigned int key, abi_gi_profile_t *out) {
    ENTER_PROFILE(nvmlDeviceGetGpuInstanceProfileInfo);
    *out = (abi_gi_profile_t){full.id, 0, full.sliceCount, full.instanceCount, full.multiprocessorCount,
                              full.copyEngineCount, full.decoderCount, full.encoderCount, full.jpegCount,
                              full.ofaCount, full.memorySizeMB};
    return RC_SUCCESS;
}

API int nvmlDeviceGetGpuInstanceProfileInfoV(handle_t device, unsigned int key, void *out) {
    ENTER_PROFILE(nvmlDeviceGetGpuInstanceProfileInfoV);
    unsigned int version = *(unsigned int *)out;
    if (version == ABI_VERSION(abi_gi_profile_v3_t, 3)) {
        full.version = version;
        memcpy(out, &full, sizeof full);
        return RC_SUCCESS;
    }
    if (version != ABI_VERSION(abi_gi_profile_v2_t, 2)) return RC_ARGUMENT_VERSION_MISMATCH;
    abi_gi_profile_v2_t second = {version, full.id, 0, full.sliceCount, full.instanceCount,
                                  full.multiprocessorCount, full.copyEngineCount, full.decoderCount,
                                  full.encoderCount, full.jpegCount, full.ofaCount, full.memorySizeMB, {0}};
    memcpy(second.name, full.name, sizeof second.name);
    memcpy(out, &second, sizeof second);
    return RC_SUCCESS;
}

static int placements(int function, handle_t device, unsigned int profile_id, abi_placement_t *out,
                      unsigned int *count) {
    struct target at = resolve(device);
    int refused = gate(function, at.gpu);
    if (!refused) refused = whole_device(&at);
    if (refused) return refused;
    REQUIRE(count);
    const struct gpu_config *gpu = gpu_config(at.gpu);
    unsigned int row = profile_by(gpu, gpu->profile_id, profile_id), found = 0;
    if (row == NODE_PROFILES) return RC_NOT_SUPPORTED;
    uint64_t starts = number(gpu->profile_starts + row);
    for (unsigned int start = 0; start < 64; start++) {
        if (!(starts >> start & 1)) continue;
        if (out) out[found] = (abi_placement_t){start, (unsigned int)number(gpu->profile_size + row)};
        found++;
    }
    *count = found;
    return RC_SUCCESS;
}

API int nvmlDeviceGetGpuInstancePossiblePlacements(handle_t device, unsigned int profile_id,
                                                   abi_placement_t *out, unsigned int *count) {
    return placements(FN_nvmlDeviceGetGpuInstancePossiblePlacements, device, profile_id, out, count);
}

API int nvmlDeviceGetGpuInstancePossiblePlacements_v2(handle_t device, unsigned int profile_id,
                                                      abi_placement_t *out, unsigned int *count) {
    return placements(FN_nvmlDeviceGetGpuInstancePossiblePlacements_v2, device, profile_id, out, count);
}

/* --- GPU instances ------------------------------------------------------------------------------------- */

API int nvmlDeviceGetGpuInstances(handle_t device, unsigned int profile_id, handle_t *out,
                                  unsigned int *count) {
    ENTER_DEVICE(nvmlDeviceGetGpuInstances, device);
    REQUIRE(out && count);
    struct slice all[NODE_MIGS];
    unsigned int rows = slices_of(gpu, all);
    *count = 0;
    for (unsigned int row = 0; row < rows; row++) {
        bool again = false;
        for (unsigned int before = 0; before < row; before++) again |= all[before].gi == all[row].gi;
        if (again || number(gpu->profile_id + all[row].profile) != profile_id) continue;
        out[(*count)++] = handle_of(GPU_INSTANCE, at.gpu, &all[row]);
    }
    return RC_SUCCESS;
}

API int nvmlDeviceGetGpuInstanceById(handle_t device, unsigned int id, handle_t *out) {
    ENTER_DEVICE(nvmlDeviceGetGpuInstanceById, device);
    REQUIRE(out);
    struct slice slice;
    if (!find_slice(gpu, id, 0, true, &slice)) return RC_NOT_FOUND;
    *out = handle_of(GPU_INSTANCE, at.gpu, &slice);
    return RC_SUCCESS;
}

API int nvmlGpuInstanceGetInfo(handle_t instance, abi_gi_info_t *out) {
    ENTER_SLICE(nvmlGpuInstanceGetInfo, GPU_INSTANCE, instance);
    *out = (abi_gi_info_t){device_handle(at.gpu),
                           slice.gi,
                           (unsigned int)number(gpu->profile_id + slice.profile),
                           {slice.start, (unsigned int)number(gpu->profile_size + slice.profile)}};
    return RC_SUCCESS;
}

/* --- compute instances --------------------------------------------------------------------------------- */

static unsigned int compute_profile(unsigned int slices) {
    unsigned int key = 0;
    while (key < COMPUTE_PROFILE_KEYS && compute_slices[key] != slices) key++;
    return key;
}

API int nvmlGpuInstanceGetComputeInstanceProfileInfo(handle_t instance, unsigned int key, unsigned int engines,
                                                     abi_ci_profile_t *out) {
    ENTER_SLICE(nvmlGpuInstanceGetComputeInstanceProfileInfo, GPU_INSTANCE, instance);
    REQUIRE(key < COMPUTE_PROFILE_KEYS && engines == 0);
    unsigned int profile = slice.profile, whole = (unsigned int)number(gpu->profile_slices + profile);
    unsigned int slices = compute_slices[key];
    if (!slices || slices > whole) return RC_NOT_SUPPORTED;
    *out = (abi_ci_profile_t){
        .id = key,
        .sliceCount = slices,
        .instanceCount = whole / slices,
        .multiprocessorCount = compute_sms(gpu, profile, slices),
        .sharedCopyEngineCount = (unsigned int)number(gpu->profile_copy_engines + profile),
        .sharedDecoderCount = (unsigned int)number(gpu->profile_decoders + profile),
        .sharedEncoderCount = (unsigned int)number(gpu->profile_encoders + profile),
        .sharedJpegCount = (unsigned int)number(gpu->profile_jpegs + profile),
        .sharedOfaCount = (unsigned int)number(gpu->profile_ofas + profile)};
    return RC_SUCCESS;
}

API int nvmlGpuInstanceGetComputeInstances(handle_t instance, unsigned int profile_id, handle_t *out,
                                           unsigned int *count) {
    ENTER_SLICE(nvmlGpuInstanceGetComputeInstances, GPU_INSTANCE, instance);
    REQUIRE(count);
    struct slice all[NODE_MIGS];
    unsigned int rows = slices_of(gpu, all);
    *count = 0;
    for (unsigned int row = 0; row < rows; row++)
        if (all[row].gi == slice.gi && compute_profile(all[row].slices) == profile_id)
            out[(*count)++] = handle_of(COMPUTE_INSTANCE, at.gpu, &all[row]);
    return RC_SUCCESS;
}

API int nvmlGpuInstanceGetComputeInstanceById(handle_t instance, unsigned int id, handle_t *out) {
    ENTER_SLICE(nvmlGpuInstanceGetComputeInstanceById, GPU_INSTANCE, instance);
    struct slice found;
    if (!find_slice(gpu, slice.gi, id, false, &found)) return RC_NOT_FOUND;
    *out = handle_of(COMPUTE_INSTANCE, at.gpu, &found);
    return RC_SUCCESS;
}

static void fill_compute(const struct target *at, const struct slice *slice, abi_ci_info_t *out) {
    *out = (abi_ci_info_t){device_handle(at->gpu), handle_of(GPU_INSTANCE, at->gpu, slice), slice->ci,
                           compute_profile(slice->slices), {slice->compute_start, slice->slices}};
}

/* The first version ends before the placement. */
API int nvmlComputeInstanceGetInfo(handle_t instance, void *out) {
    ENTER_SLICE(nvmlComputeInstanceGetInfo, COMPUTE_INSTANCE, instance);
    (void)gpu;
    abi_ci_info_t full;
    fill_compute(&at, &slice, &full);
    memcpy(out, &full, offsetof(abi_ci_info_t, placement));
    return RC_SUCCESS;
}

API int nvmlComputeInstanceGetInfo_v2(handle_t instance, abi_ci_info_t *out) {
    ENTER_SLICE(nvmlComputeInstanceGetInfo_v2, COMPUTE_INSTANCE, instance);
    (void)gpu;
    fill_compute(&at, &slice, out);
    return RC_SUCCESS;
}
