/* Every function the library exports, numbered: what a client may resolve must be there.
 *
 * ANSWERED functions are written out in the C files. UNANSWERED ones count, hang and fail like the others and
 * otherwise answer NOT_SUPPORTED; a feature that needs one moves it up and writes it.
 */
#pragma once

#define ANSWERED_FUNCTIONS(F)                                                                               \
    F(nvmlInit) F(nvmlInit_v2) F(nvmlInitWithFlags) F(nvmlShutdown) F(nvmlErrorString)                      \
    F(nvmlSystemGetDriverVersion) F(nvmlSystemGetNVMLVersion) F(nvmlSystemGetCudaDriverVersion)             \
    F(nvmlSystemGetCudaDriverVersion_v2) F(nvmlDeviceGetCount) F(nvmlDeviceGetCount_v2)                     \
    F(nvmlDeviceGetHandleByIndex) F(nvmlDeviceGetHandleByIndex_v2) F(nvmlDeviceGetHandleByUUID)             \
    F(nvmlDeviceGetHandleByPciBusId) F(nvmlDeviceGetHandleByPciBusId_v2) F(nvmlDeviceGetIndex)              \
    F(nvmlDeviceGetUUID) F(nvmlDeviceGetMinorNumber) F(nvmlDeviceGetName) F(nvmlDeviceGetBrand)             \
    F(nvmlDeviceGetSerial) F(nvmlDeviceGetBoardPartNumber) F(nvmlDeviceGetVbiosVersion)                     \
    F(nvmlDeviceGetInforomImageVersion) F(nvmlDeviceGetArchitecture) F(nvmlDeviceGetCudaComputeCapability)  \
    F(nvmlDeviceGetMemoryInfo) F(nvmlDeviceGetMemoryInfo_v2) F(nvmlDeviceGetPciInfo_v3)                     \
    F(nvmlDeviceGetNumaNodeId) F(nvmlDeviceGetCpuAffinity) F(nvmlDeviceGetAddressingMode)                   \
    F(nvmlDeviceGetTemperature) F(nvmlDeviceGetTemperatureThreshold) F(nvmlDeviceGetUtilizationRates)       \
    F(nvmlDeviceGetPowerUsage) F(nvmlDeviceGetPowerManagementLimit) F(nvmlDeviceGetEnforcedPowerLimit)      \
    F(nvmlDeviceGetTotalEnergyConsumption) F(nvmlDeviceGetPerformanceState) F(nvmlDeviceGetClockInfo)       \
    F(nvmlDeviceGetMaxClockInfo) F(nvmlDeviceGetCurrentClocksEventReasons)                                  \
    F(nvmlDeviceGetCurrentClocksThrottleReasons) F(nvmlDeviceGetEccMode) F(nvmlDeviceGetTotalEccErrors)     \
    F(nvmlDeviceGetRemappedRows) F(nvmlDeviceGetRetiredPagesPendingStatus)                                  \
    F(nvmlDeviceGetPcieReplayCounter) F(nvmlDeviceGetPcieThroughput)                                        \
    F(nvmlDeviceGetCurrPcieLinkGeneration) F(nvmlDeviceGetCurrPcieLinkWidth)                                \
    F(nvmlDeviceGetMaxPcieLinkGeneration) F(nvmlDeviceGetMaxPcieLinkWidth)                                  \
    F(nvmlDeviceGetComputeRunningProcesses_v2) F(nvmlDeviceGetComputeRunningProcesses_v3)                   \
    F(nvmlDeviceGetGraphicsRunningProcesses_v2) F(nvmlDeviceGetGraphicsRunningProcesses_v3)                 \
    F(nvmlDeviceGetMPSComputeRunningProcesses_v2) F(nvmlDeviceGetMPSComputeRunningProcesses_v3)             \
    F(nvmlDeviceGetNvLinkState) F(nvmlDeviceGetNvLinkRemotePciInfo) F(nvmlDeviceGetNvLinkRemotePciInfo_v2)  \
    F(nvmlDeviceGetNvLinkRemoteDeviceType) F(nvmlDeviceGetTopologyCommonAncestor)                           \
    F(nvmlDeviceGetGpuFabricInfo) F(nvmlDeviceGetGpuFabricInfoV) F(nvmlSystemEventSetCreate)                \
    F(nvmlSystemRegisterEvents) F(nvmlSystemEventSetWait) F(nvmlSystemEventSetFree)                         \
    F(nvmlDeviceGetFieldValues) F(nvmlEventSetCreate) F(nvmlEventSetFree) F(nvmlEventSetWait)               \
    F(nvmlEventSetWait_v2) F(nvmlDeviceRegisterEvents) F(nvmlDeviceGetSupportedEventTypes)                  \
    F(nvmlDeviceGetMigMode) F(nvmlDeviceGetMaxMigDeviceCount) F(nvmlDeviceGetMigDeviceHandleByIndex)        \
    F(nvmlDeviceGetGpuInstanceId) F(nvmlDeviceGetComputeInstanceId) F(nvmlDeviceGetAttributes_v2)           \
    F(nvmlDeviceGetGpuInstanceProfileInfo) F(nvmlDeviceGetGpuInstanceById) F(nvmlGpuInstanceGetInfo)

#define UNANSWERED_FUNCTIONS(F)                                                                             \
    F(nvmlComputeInstanceDestroy) F(nvmlComputeInstanceGetInfo) F(nvmlComputeInstanceGetInfo_v2)            \
    F(nvmlDeviceClearAccountingPids) F(nvmlDeviceClearCpuAffinity) F(nvmlDeviceClearEccErrorCounts)         \
    F(nvmlDeviceClearFieldValues) F(nvmlDeviceCreateGpuInstance)                                            \
    F(nvmlDeviceCreateGpuInstanceWithPlacement) F(nvmlDeviceDiscoverGpus)                                   \
    F(nvmlDeviceFreezeNvLinkUtilizationCounter) F(nvmlDeviceGetAPIRestriction)                              \
    F(nvmlDeviceGetAccountingBufferSize) F(nvmlDeviceGetAccountingMode) F(nvmlDeviceGetAccountingPids)      \
    F(nvmlDeviceGetAccountingStats) F(nvmlDeviceGetAccountingStats_v2) F(nvmlDeviceGetActiveVgpus)          \
    F(nvmlDeviceGetAdaptiveClockInfoStatus) F(nvmlDeviceGetAdaptiveTgpModeInfo_v1)                          \
    F(nvmlDeviceGetApplicationsClock) F(nvmlDeviceGetAttributes) F(nvmlDeviceGetAutoBoostedClocksEnabled)   \
    F(nvmlDeviceGetBAR1MemoryInfo) F(nvmlDeviceGetBBXTimeData_v1) F(nvmlDeviceGetBankRemapperStatus_v1)     \
    F(nvmlDeviceGetBoardId) F(nvmlDeviceGetBridgeChipInfo) F(nvmlDeviceGetBusType)                          \
    F(nvmlDeviceGetC2cModeInfoV) F(nvmlDeviceGetCapabilities) F(nvmlDeviceGetClkMonStatus)                  \
    F(nvmlDeviceGetClock) F(nvmlDeviceGetClockOffsets) F(nvmlDeviceGetComputeMode)                          \
    F(nvmlDeviceGetComputeRunningProcesses) F(nvmlDeviceGetConfComputeGpuAttestationReport)                 \
    F(nvmlDeviceGetConfComputeGpuCertificate) F(nvmlDeviceGetConfComputeMemSizeInfo)                        \
    F(nvmlDeviceGetConfComputeProtectedMemoryUsage) F(nvmlDeviceGetCoolerInfo)                              \
    F(nvmlDeviceGetCpuAffinityWithinScope) F(nvmlDeviceGetCreatableVgpus)                                   \
    F(nvmlDeviceGetCurrentClockFreqs) F(nvmlDeviceGetDecoderUtilization)                                    \
    F(nvmlDeviceGetDefaultApplicationsClock) F(nvmlDeviceGetDefaultEccMode)                                 \
    F(nvmlDeviceGetDetailedEccErrors) F(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)                       \
    F(nvmlDeviceGetDisplayActive) F(nvmlDeviceGetDisplayMode) F(nvmlDeviceGetDramEncryptionMode)            \
    F(nvmlDeviceGetDriverModel) F(nvmlDeviceGetDriverModel_v2) F(nvmlDeviceGetDynamicPstatesInfo)           \
    F(nvmlDeviceGetEncoderCapacity) F(nvmlDeviceGetEncoderSessions) F(nvmlDeviceGetEncoderStats)            \
    F(nvmlDeviceGetEncoderUtilization) F(nvmlDeviceGetFBCSessions) F(nvmlDeviceGetFBCStats)                 \
    F(nvmlDeviceGetFanControlPolicy_v2) F(nvmlDeviceGetFanSpeed) F(nvmlDeviceGetFanSpeedRPM)                \
    F(nvmlDeviceGetFanSpeed_v2) F(nvmlDeviceGetGpcClkMinMaxVfOffset) F(nvmlDeviceGetGpcClkVfOffset)         \
    F(nvmlDeviceGetGpuFabricInfo_v4) F(nvmlDeviceGetGpuInstancePossiblePlacements)                          \
    F(nvmlDeviceGetGpuInstancePossiblePlacements_v2) F(nvmlDeviceGetGpuInstanceProfileInfoByIdV)            \
    F(nvmlDeviceGetGpuInstanceProfileInfoV) F(nvmlDeviceGetGpuInstanceRemainingCapacity)                    \
    F(nvmlDeviceGetGpuInstances) F(nvmlDeviceGetGpuMaxPcieLinkGeneration) F(nvmlDeviceGetGpuOperationMode)  \
    F(nvmlDeviceGetGraphicsRunningProcesses) F(nvmlDeviceGetGridLicensableFeatures)                         \
    F(nvmlDeviceGetGridLicensableFeatures_v4) F(nvmlDeviceGetGspFirmwareMode)                               \
    F(nvmlDeviceGetGspFirmwareVersion) F(nvmlDeviceGetHandleBySerial) F(nvmlDeviceGetHandleByUUIDV)         \
    F(nvmlDeviceGetHostVgpuMode) F(nvmlDeviceGetHostname_v1) F(nvmlDeviceGetInforomConfigurationChecksum)   \
    F(nvmlDeviceGetInforomVersion) F(nvmlDeviceGetIrqNum) F(nvmlDeviceGetJpgUtilization)                    \
    F(nvmlDeviceGetLastBBXFlushTime) F(nvmlDeviceGetMPSComputeRunningProcesses)                             \
    F(nvmlDeviceGetMarginTemperature) F(nvmlDeviceGetMaxCustomerBoostClock)                                 \
    F(nvmlDeviceGetMemClkMinMaxVfOffset) F(nvmlDeviceGetMemClkVfOffset) F(nvmlDeviceGetMemoryAffinity)      \
    F(nvmlDeviceGetMemoryBusWidth) F(nvmlDeviceGetMemoryErrorCounter) F(nvmlDeviceGetMemoryLimits_v1)       \
    F(nvmlDeviceGetMinMaxClockOfPState) F(nvmlDeviceGetMinMaxFanSpeed) F(nvmlDeviceGetModuleId)             \
    F(nvmlDeviceGetMultiGpuBoard) F(nvmlDeviceGetNumFans) F(nvmlDeviceGetNumGpuCores)                       \
    F(nvmlDeviceGetNvLinkCapability) F(nvmlDeviceGetNvLinkErrorCounter) F(nvmlDeviceGetNvLinkInfo)          \
    F(nvmlDeviceGetNvLinkTelemetrySamples_v1) F(nvmlDeviceGetNvLinkUtilizationControl)                      \
    F(nvmlDeviceGetNvLinkUtilizationCounter) F(nvmlDeviceGetNvLinkVersion) F(nvmlDeviceGetNvlinkBwMode)     \
    F(nvmlDeviceGetNvlinkSupportedBwModes) F(nvmlDeviceGetOfaUtilization) F(nvmlDeviceGetP2PStatus)         \
    F(nvmlDeviceGetPciInfo) F(nvmlDeviceGetPciInfoExt) F(nvmlDeviceGetPciInfo_v2)                           \
    F(nvmlDeviceGetPcieLinkMaxSpeed) F(nvmlDeviceGetPcieSpeed) F(nvmlDeviceGetPdi)                          \
    F(nvmlDeviceGetPerformanceModes) F(nvmlDeviceGetPersistenceMode) F(nvmlDeviceGetPgpuMetadataString)     \
    F(nvmlDeviceGetPlatformInfo) F(nvmlDeviceGetPowerManagementDefaultLimit)                                \
    F(nvmlDeviceGetPowerManagementLimitConstraints) F(nvmlDeviceGetPowerManagementMode)                     \
    F(nvmlDeviceGetPowerMizerMode_v1) F(nvmlDeviceGetPowerSource) F(nvmlDeviceGetPowerState)                \
    F(nvmlDeviceGetProcessUtilization) F(nvmlDeviceGetProcessesUtilizationInfo)                             \
    F(nvmlDeviceGetRemappedRows_v2) F(nvmlDeviceGetRepairStatus) F(nvmlDeviceGetRetiredPages)               \
    F(nvmlDeviceGetRetiredPages_v2) F(nvmlDeviceGetRowRemapperHistogram)                                    \
    F(nvmlDeviceGetRunningProcessDetailList) F(nvmlDeviceGetSamples) F(nvmlDeviceGetSramEccErrorStatus)     \
    F(nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts) F(nvmlDeviceGetSupportedClocksEventReasons)         \
    F(nvmlDeviceGetSupportedClocksThrottleReasons) F(nvmlDeviceGetSupportedGraphicsClocks)                  \
    F(nvmlDeviceGetSupportedMemoryClocks) F(nvmlDeviceGetSupportedPerformanceStates)                        \
    F(nvmlDeviceGetSupportedVgpus) F(nvmlDeviceGetTargetFanSpeed) F(nvmlDeviceGetTemperatureV)              \
    F(nvmlDeviceGetThermalSettings) F(nvmlDeviceGetTopologyNearestGpus)                                     \
    F(nvmlDeviceGetUnrepairableMemoryFlag_v1) F(nvmlDeviceGetVgpuCapabilities)                              \
    F(nvmlDeviceGetVgpuHeterogeneousMode) F(nvmlDeviceGetVgpuInstancesUtilizationInfo)                      \
    F(nvmlDeviceGetVgpuMetadata) F(nvmlDeviceGetVgpuProcessUtilization)                                     \
    F(nvmlDeviceGetVgpuProcessesUtilizationInfo) F(nvmlDeviceGetVgpuSchedulerCapabilities)                  \
    F(nvmlDeviceGetVgpuSchedulerLog) F(nvmlDeviceGetVgpuSchedulerLog_v2)                                    \
    F(nvmlDeviceGetVgpuSchedulerState) F(nvmlDeviceGetVgpuSchedulerState_v2)                                \
    F(nvmlDeviceGetVgpuTypeCreatablePlacements) F(nvmlDeviceGetVgpuTypeSupportedPlacements)                 \
    F(nvmlDeviceGetVgpuUtilization) F(nvmlDeviceGetViolationStatus) F(nvmlDeviceGetVirtualizationMode)      \
    F(nvmlDeviceIsMigDeviceHandle) F(nvmlDeviceModifyDrainState) F(nvmlDeviceOnSameBoard)                   \
    F(nvmlDevicePerfMetricsGetSamples_v1) F(nvmlDevicePowerSmoothingActivatePresetProfile)                  \
    F(nvmlDevicePowerSmoothingSetState) F(nvmlDevicePowerSmoothingUpdatePresetProfileParam)                 \
    F(nvmlDeviceQueryDrainState) F(nvmlDeviceReadPRMCounters_v1) F(nvmlDeviceReadWritePRM_v1)               \
    F(nvmlDeviceRemoveGpu) F(nvmlDeviceRemoveGpu_v2) F(nvmlDeviceResetApplicationsClocks)                   \
    F(nvmlDeviceResetGpuLockedClocks) F(nvmlDeviceResetMemoryLockedClocks)                                  \
    F(nvmlDeviceResetNvLinkErrorCounters) F(nvmlDeviceResetNvLinkUtilizationCounter)                        \
    F(nvmlDeviceSetAPIRestriction) F(nvmlDeviceSetAccountingMode) F(nvmlDeviceSetAdaptiveTgpMode_v1)        \
    F(nvmlDeviceSetApplicationsClocks) F(nvmlDeviceSetAutoBoostedClocksEnabled)                             \
    F(nvmlDeviceSetClockOffsets) F(nvmlDeviceSetComputeMode) F(nvmlDeviceSetConfComputeUnprotectedMemSize)  \
    F(nvmlDeviceSetCpuAffinity) F(nvmlDeviceSetDefaultAutoBoostedClocksEnabled)                             \
    F(nvmlDeviceSetDefaultFanSpeed_v2) F(nvmlDeviceSetDramEncryptionMode) F(nvmlDeviceSetDriverModel)       \
    F(nvmlDeviceSetEccMode) F(nvmlDeviceSetFanControlPolicy) F(nvmlDeviceSetFanSpeed_v2)                    \
    F(nvmlDeviceSetGpcClkVfOffset) F(nvmlDeviceSetGpuLockedClocks) F(nvmlDeviceSetGpuOperationMode)         \
    F(nvmlDeviceSetHostname_v1) F(nvmlDeviceSetMemClkVfOffset) F(nvmlDeviceSetMemoryLimits_v1)              \
    F(nvmlDeviceSetMemoryLockedClocks) F(nvmlDeviceSetMigMode)                                              \
    F(nvmlDeviceSetNvLinkDeviceLowPowerThreshold) F(nvmlDeviceSetNvLinkUtilizationControl)                  \
    F(nvmlDeviceSetNvlinkBwMode) F(nvmlDeviceSetNvlinkBwModeAsync_v1) F(nvmlDeviceSetPersistenceMode)       \
    F(nvmlDeviceSetPowerManagementLimit) F(nvmlDeviceSetPowerManagementLimit_v2)                            \
    F(nvmlDeviceSetPowerMizerMode_v1) F(nvmlDeviceSetRusdSettings_v1) F(nvmlDeviceSetTemperatureThreshold)  \
    F(nvmlDeviceSetVgpuCapabilities) F(nvmlDeviceSetVgpuHeterogeneousMode)                                  \
    F(nvmlDeviceSetVgpuSchedulerState) F(nvmlDeviceSetVgpuSchedulerState_v2)                                \
    F(nvmlDeviceSetVirtualizationMode) F(nvmlDeviceValidateInforom) F(nvmlDeviceVgpuForceGspUnload)         \
    F(nvmlDeviceWorkloadPowerProfileClearRequestedProfiles)                                                 \
    F(nvmlDeviceWorkloadPowerProfileGetCurrentProfiles) F(nvmlDeviceWorkloadPowerProfileGetProfilesInfo)    \
    F(nvmlDeviceWorkloadPowerProfileSetRequestedProfiles)                                                   \
    F(nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1) F(nvmlEventSetGetContextCount_v1)                    \
    F(nvmlEventSetGetContextData_v1) F(nvmlEventSetGetContextInfo_v1)                                       \
    F(nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1)                                                \
    F(nvmlEventSetRegisterGpuOperationalEvents_v1) F(nvmlEventSetWait_v3) F(nvmlGetBlacklistDeviceCount)    \
    F(nvmlGetBlacklistDeviceInfoByIndex) F(nvmlGetExcludedDeviceCount) F(nvmlGetExcludedDeviceInfoByIndex)  \
    F(nvmlGetVgpuCompatibility) F(nvmlGetVgpuDriverCapabilities) F(nvmlGetVgpuVersion)                      \
    F(nvmlGpmMetricsGet) F(nvmlGpmMigSampleGet) F(nvmlGpmQueryDeviceSupport)                                \
    F(nvmlGpmQueryIfStreamingEnabled) F(nvmlGpmSampleAlloc) F(nvmlGpmSampleFree) F(nvmlGpmSampleGet)        \
    F(nvmlGpmSetStreamingEnabled) F(nvmlGpuInstanceCreateComputeInstance)                                   \
    F(nvmlGpuInstanceCreateComputeInstanceWithPlacement) F(nvmlGpuInstanceDestroy)                          \
    F(nvmlGpuInstanceGetActiveVgpus) F(nvmlGpuInstanceGetComputeInstanceById)                               \
    F(nvmlGpuInstanceGetComputeInstancePossiblePlacements) F(nvmlGpuInstanceGetComputeInstanceProfileInfo)  \
    F(nvmlGpuInstanceGetComputeInstanceProfileInfoV) F(nvmlGpuInstanceGetComputeInstanceRemainingCapacity)  \
    F(nvmlGpuInstanceGetComputeInstances) F(nvmlGpuInstanceGetCreatableVgpus)                               \
    F(nvmlGpuInstanceGetVgpuHeterogeneousMode) F(nvmlGpuInstanceGetVgpuSchedulerLog)                        \
    F(nvmlGpuInstanceGetVgpuSchedulerLog_v2) F(nvmlGpuInstanceGetVgpuSchedulerState)                        \
    F(nvmlGpuInstanceGetVgpuSchedulerState_v2) F(nvmlGpuInstanceGetVgpuTypeCreatablePlacements)             \
    F(nvmlGpuInstanceSetVgpuHeterogeneousMode) F(nvmlGpuInstanceSetVgpuSchedulerState)                      \
    F(nvmlGpuInstanceSetVgpuSchedulerState_v2) F(nvmlSetVgpuVersion) F(nvmlSystemGetCPER_v1)                \
    F(nvmlSystemGetConfComputeCapabilities) F(nvmlSystemGetConfComputeGpusReadyState)                       \
    F(nvmlSystemGetConfComputeKeyRotationThresholdInfo) F(nvmlSystemGetConfComputeSettings)                 \
    F(nvmlSystemGetConfComputeState) F(nvmlSystemGetDriverBranch) F(nvmlSystemGetHicVersion)                \
    F(nvmlSystemGetNvlinkBwMode) F(nvmlSystemGetProcessName) F(nvmlSystemGetTopologyGpuSet)                 \
    F(nvmlSystemSetConfComputeGpusReadyState) F(nvmlSystemSetConfComputeKeyRotationThresholdInfo)           \
    F(nvmlSystemSetNvlinkBwMode) F(nvmlUnitGetCount) F(nvmlUnitGetDevices) F(nvmlUnitGetFanSpeedInfo)       \
    F(nvmlUnitGetHandleByIndex) F(nvmlUnitGetLedState) F(nvmlUnitGetPsuInfo) F(nvmlUnitGetTemperature)      \
    F(nvmlUnitGetUnitInfo) F(nvmlUnitSetLedState) F(nvmlVgpuInstanceClearAccountingPids)                    \
    F(nvmlVgpuInstanceGetAccountingMode) F(nvmlVgpuInstanceGetAccountingPids)                               \
    F(nvmlVgpuInstanceGetAccountingStats) F(nvmlVgpuInstanceGetEccMode)                                     \
    F(nvmlVgpuInstanceGetEncoderCapacity) F(nvmlVgpuInstanceGetEncoderSessions)                             \
    F(nvmlVgpuInstanceGetEncoderStats) F(nvmlVgpuInstanceGetFBCSessions) F(nvmlVgpuInstanceGetFBCStats)     \
    F(nvmlVgpuInstanceGetFbUsage) F(nvmlVgpuInstanceGetFrameRateLimit) F(nvmlVgpuInstanceGetGpuInstanceId)  \
    F(nvmlVgpuInstanceGetGpuPciId) F(nvmlVgpuInstanceGetLicenseInfo) F(nvmlVgpuInstanceGetLicenseInfo_v2)   \
    F(nvmlVgpuInstanceGetLicenseStatus) F(nvmlVgpuInstanceGetMdevUUID) F(nvmlVgpuInstanceGetMetadata)       \
    F(nvmlVgpuInstanceGetPlacementId) F(nvmlVgpuInstanceGetRuntimeStateSize) F(nvmlVgpuInstanceGetType)     \
    F(nvmlVgpuInstanceGetUUID) F(nvmlVgpuInstanceGetVmDriverVersion) F(nvmlVgpuInstanceGetVmID)             \
    F(nvmlVgpuInstanceSetEncoderCapacity) F(nvmlVgpuTypeGetBAR1Info) F(nvmlVgpuTypeGetCapabilities)         \
    F(nvmlVgpuTypeGetClass) F(nvmlVgpuTypeGetDeviceID) F(nvmlVgpuTypeGetFbReservation)                      \
    F(nvmlVgpuTypeGetFrameRateLimit) F(nvmlVgpuTypeGetFramebufferSize)                                      \
    F(nvmlVgpuTypeGetGpuInstanceProfileId) F(nvmlVgpuTypeGetGspHeapSize) F(nvmlVgpuTypeGetLicense)          \
    F(nvmlVgpuTypeGetMaxInstances) F(nvmlVgpuTypeGetMaxInstancesPerGpuInstance)                             \
    F(nvmlVgpuTypeGetMaxInstancesPerVm) F(nvmlVgpuTypeGetName) F(nvmlVgpuTypeGetNumDisplayHeads)            \
    F(nvmlVgpuTypeGetResolution)

#define DECLARE_FUNCTION(name) FN_##name,
enum function { ANSWERED_FUNCTIONS(DECLARE_FUNCTION) UNANSWERED_FUNCTIONS(DECLARE_FUNCTION) FUNCTIONS };
#undef DECLARE_FUNCTION
