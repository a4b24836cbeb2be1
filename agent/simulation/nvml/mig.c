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

enum { PROFILE_KEYS = 0x12 }; /* NVML_GPU_INSTANCE_PROFILE_COUNT */

struct slice {
    unsigned int row, profile, gi, ci, slices, start;
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
    for (int position = 0; position < (int)number(node_current()->config.gpus); position++) {
        const struct gpu_config *at = gpu_config(position);
        struct slice all[NODE_MIGS];
        unsigned int count = number(at->visible) ? slices_of(at, all) : 0;
        for (unsigned int row = 0; row < count; row++)
            if (strcmp(at->mig_uuid[row], uuid) == 0) {
                *handle = handle_of(MIG_DEVICE, position, &all[row]);
                *gpu = position;
                return true;
            }
    }
    return false;
}

API int nvmlDeviceGetMigMode(handle_t device, unsigned int *current, unsigned int *pending) {
    ENTER_DEVICE(nvmlDeviceGetMigMode, device);
    int code = answer_number(gpu->mig_mode, current);
    return code ? code : answer_number(gpu->mig_pending, pending);
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

static unsigned int compute_sms(const struct gpu_config *gpu, unsigned int profile, unsigned int slices) {
    uint64_t whole = number(gpu->profile_slices + profile);
    return whole ? (unsigned int)(number(gpu->profile_sms + profile) * slices / whole) : 0;
}

static int attributes(int function, handle_t device, abi_attributes_t *out) {
    struct target at = resolve(device);
    int code = gate(function, at.gpu);
    if (code) return code;
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

API int nvmlDeviceGetAttributes_v2(handle_t device, abi_attributes_t *out) {
    return attributes(FN_nvmlDeviceGetAttributes_v2, device, out);
}

/* --- profiles ------------------------------------------------------------------------------------------ */

/* The row of the profile whose `column` is `value`, or NODE_PROFILES. */
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

/* --- GPU instances ------------------------------------------------------------------------------------- */

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

