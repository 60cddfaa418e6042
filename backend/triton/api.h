// The part of Triton's C API that this backend uses.
//
// With the official headers on the include path they are used; otherwise the declarations below stand in (the C ABI is
// stable; TRITONBACKEND_Initialize checks the version at load).  Functions that older servers lack are not declared
// here: metrics.cc looks them up with dlsym.
#pragma once

#include <cstddef>
#include <cstdint>

#if __has_include(<triton/core/tritonbackend.h>)
#include <triton/core/tritonbackend.h>
#include <triton/core/tritonserver.h>
#else

extern "C" {

struct TRITONSERVER_Error;
struct TRITONSERVER_Message;
struct TRITONSERVER_Metric;
struct TRITONSERVER_MetricFamily;
struct TRITONSERVER_Parameter;
struct TRITONSERVER_Server;
struct TRITONBACKEND_Backend;
struct TRITONBACKEND_BackendAttribute;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_Model;
struct TRITONBACKEND_ModelInstance;
struct TRITONBACKEND_Output;
struct TRITONBACKEND_Request;
struct TRITONBACKEND_Response;
struct TRITONBACKEND_ResponseFactory;

typedef enum { TRITONBACKEND_ARTIFACT_FILESYSTEM } TRITONBACKEND_ArtifactType;
typedef enum {
  TRITONSERVER_MEMORY_CPU,
  TRITONSERVER_MEMORY_CPU_PINNED,
  TRITONSERVER_MEMORY_GPU
} TRITONSERVER_MemoryType;
typedef enum {
  TRITONSERVER_PARAMETER_STRING,
  TRITONSERVER_PARAMETER_INT,
  TRITONSERVER_PARAMETER_BOOL,
  TRITONSERVER_PARAMETER_DOUBLE,
  TRITONSERVER_PARAMETER_BYTES
} TRITONSERVER_ParameterType;
typedef enum {
  TRITONSERVER_INSTANCEGROUPKIND_AUTO,
  TRITONSERVER_INSTANCEGROUPKIND_CPU,
  TRITONSERVER_INSTANCEGROUPKIND_GPU,
  TRITONSERVER_INSTANCEGROUPKIND_MODEL
} TRITONSERVER_InstanceGroupKind;
typedef enum {
  TRITONSERVER_LOG_INFO,
  TRITONSERVER_LOG_WARN,
  TRITONSERVER_LOG_ERROR,
  TRITONSERVER_LOG_VERBOSE
} TRITONSERVER_LogLevel;
typedef enum {
  TRITONSERVER_ERROR_UNKNOWN,
  TRITONSERVER_ERROR_INTERNAL,
  TRITONSERVER_ERROR_NOT_FOUND,
  TRITONSERVER_ERROR_INVALID_ARG,
  TRITONSERVER_ERROR_UNAVAILABLE,
  TRITONSERVER_ERROR_UNSUPPORTED,
  TRITONSERVER_ERROR_ALREADY_EXISTS,
  TRITONSERVER_ERROR_CANCELLED
} TRITONSERVER_Error_Code;
typedef enum { TRITONSERVER_METRIC_KIND_COUNTER, TRITONSERVER_METRIC_KIND_GAUGE } TRITONSERVER_MetricKind;
typedef enum {
  TRITONSERVER_TYPE_INVALID = 0,
  TRITONSERVER_TYPE_UINT64 = 5,
  TRITONSERVER_TYPE_BYTES = 13
} TRITONSERVER_DataType;  // the numbers not named here cross the wire as they are
enum { TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1 };
enum { TRITONSERVER_REQUEST_RELEASE_ALL = 1 };

typedef TRITONSERVER_Error* TritonStatus;  // only to keep the declarations below on one line each

TritonStatus TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char* message);
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error* error);
TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(TRITONSERVER_Error* error);
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error* error);
bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel level);
TritonStatus TRITONSERVER_LogMessage(
    TRITONSERVER_LogLevel level, const char* file, const int line, const char* message);
TritonStatus TRITONSERVER_MessageNewFromSerializedJson(TRITONSERVER_Message** message, const char* base, size_t size);
TritonStatus TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message* message, const char** base, size_t* size);
TritonStatus TRITONSERVER_MessageDelete(TRITONSERVER_Message* message);
TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(
    const char* name, const TRITONSERVER_ParameterType type, const void* value);
void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter* parameter);
TritonStatus TRITONSERVER_ServerIsLive(TRITONSERVER_Server* server, bool* is_live);
TritonStatus TRITONSERVER_ServerMetadata(TRITONSERVER_Server* server, TRITONSERVER_Message** metadata);
TritonStatus TRITONSERVER_ServerModelIsReady(
    TRITONSERVER_Server* server, const char* model_name, const int64_t model_version, bool* ready);
TritonStatus TRITONSERVER_ServerModelIndex(
    TRITONSERVER_Server* server, uint32_t flags, TRITONSERVER_Message** model_index);
TritonStatus TRITONSERVER_ServerLoadModel(TRITONSERVER_Server* server, const char* model_name);
TritonStatus TRITONSERVER_ServerLoadModelWithParameters(
    TRITONSERVER_Server* server, const char* model_name, const TRITONSERVER_Parameter** parameters,
    const uint64_t parameter_count);
TritonStatus TRITONSERVER_ServerUnloadModel(TRITONSERVER_Server* server, const char* model_name);
TritonStatus TRITONSERVER_MetricFamilyNew(
    TRITONSERVER_MetricFamily** family, const TRITONSERVER_MetricKind kind, const char* name, const char* description);
TritonStatus TRITONSERVER_MetricFamilyDelete(TRITONSERVER_MetricFamily* family);
TritonStatus TRITONSERVER_MetricNew(
    TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family, const TRITONSERVER_Parameter** labels,
    const uint64_t label_count);
TritonStatus TRITONSERVER_MetricDelete(TRITONSERVER_Metric* metric);
TritonStatus TRITONSERVER_MetricIncrement(TRITONSERVER_Metric* metric, double value);
TritonStatus TRITONSERVER_MetricSet(TRITONSERVER_Metric* metric, double value);

TritonStatus TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor);
TritonStatus TRITONBACKEND_BackendArtifacts(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_ArtifactType* type, const char** location);
TritonStatus TRITONBACKEND_BackendState(TRITONBACKEND_Backend* backend, void** state);
TritonStatus TRITONBACKEND_BackendSetState(TRITONBACKEND_Backend* backend, void* state);
TritonStatus TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
    TRITONBACKEND_BackendAttribute* attributes, const TRITONSERVER_InstanceGroupKind kind, const uint64_t count,
    const uint64_t* device_ids, const uint64_t id_count);
TritonStatus TRITONBACKEND_ModelName(TRITONBACKEND_Model* model, const char** name);
TritonStatus TRITONBACKEND_ModelVersion(TRITONBACKEND_Model* model, uint64_t* version);
TritonStatus TRITONBACKEND_ModelRepository(
    TRITONBACKEND_Model* model, TRITONBACKEND_ArtifactType* type, const char** location);
TritonStatus TRITONBACKEND_ModelConfig(
    TRITONBACKEND_Model* model, const uint32_t config_version, TRITONSERVER_Message** config);
TritonStatus TRITONBACKEND_ModelAutoCompleteConfig(TRITONBACKEND_Model* model, bool* auto_complete);
TritonStatus TRITONBACKEND_ModelSetConfig(
    TRITONBACKEND_Model* model, const uint32_t config_version, TRITONSERVER_Message* config);
TritonStatus TRITONBACKEND_ModelServer(TRITONBACKEND_Model* model, TRITONSERVER_Server** server);
TritonStatus TRITONBACKEND_ModelBackend(TRITONBACKEND_Model* model, TRITONBACKEND_Backend** backend);
TritonStatus TRITONBACKEND_ModelState(TRITONBACKEND_Model* model, void** state);
TritonStatus TRITONBACKEND_ModelSetState(TRITONBACKEND_Model* model, void* state);
TritonStatus TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Model** model);
TritonStatus TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request, const bool success,
    const uint64_t exec_start_ns, const uint64_t compute_start_ns, const uint64_t compute_end_ns,
    const uint64_t exec_end_ns);
TritonStatus TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance* instance, const uint64_t batch_size, const uint64_t exec_start_ns,
    const uint64_t compute_start_ns, const uint64_t compute_end_ns, const uint64_t exec_end_ns);

TritonStatus TRITONBACKEND_RequestId(TRITONBACKEND_Request* request, const char** id);
TritonStatus TRITONBACKEND_InferenceRequestTimeoutMicroseconds(TRITONBACKEND_Request* request, uint64_t* timeout);
TritonStatus TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request* request, uint32_t* count);
TritonStatus TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request* request, const uint32_t index, const char** name);
TritonStatus TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* request, uint32_t* count);
TritonStatus TRITONBACKEND_RequestInput(TRITONBACKEND_Request* request, const char* name, TRITONBACKEND_Input** input);
TritonStatus TRITONBACKEND_RequestInputByIndex(
    TRITONBACKEND_Request* request, const uint32_t index, TRITONBACKEND_Input** input);
TritonStatus TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input* input, const char** name, TRITONSERVER_DataType* datatype, const int64_t** shape,
    uint32_t* dims_count, uint64_t* byte_size, uint32_t* buffer_count);
TritonStatus TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input* input, const uint32_t index, const void** buffer, uint64_t* byte_size,
    TRITONSERVER_MemoryType* memory_type, int64_t* memory_type_id);
TritonStatus TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request* request, uint32_t* count);
TritonStatus TRITONBACKEND_RequestParameter(
    TRITONBACKEND_Request* request, const uint32_t index, const char** key, TRITONSERVER_ParameterType* type,
    const void** value);
TritonStatus TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request* request, bool* is_cancelled);
TritonStatus TRITONBACKEND_RequestRelease(TRITONBACKEND_Request* request, uint32_t flags);

TritonStatus TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory** factory, TRITONBACKEND_Request* request);
TritonStatus TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory* factory);
TritonStatus TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory* factory, const uint32_t flags);
TritonStatus TRITONBACKEND_ResponseFactoryIsCancelled(TRITONBACKEND_ResponseFactory* factory, bool* is_cancelled);
TritonStatus TRITONBACKEND_ResponseNew(TRITONBACKEND_Response** response, TRITONBACKEND_Request* request);
TritonStatus TRITONBACKEND_ResponseNewFromFactory(
    TRITONBACKEND_Response** response, TRITONBACKEND_ResponseFactory* factory);
TritonStatus TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response* response);
TritonStatus TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response* response, TRITONBACKEND_Output** output, const char* name,
    const TRITONSERVER_DataType datatype, const int64_t* shape, const uint32_t dims_count);
TritonStatus TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output* output, void** buffer, const uint64_t byte_size, TRITONSERVER_MemoryType* memory_type,
    int64_t* memory_type_id);
TritonStatus TRITONBACKEND_ResponseSend(
    TRITONBACKEND_Response* response, const uint32_t flags, TRITONSERVER_Error* error);

// What a backend implements.
TritonStatus TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend);
TritonStatus TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend);
TritonStatus TRITONBACKEND_GetBackendAttribute(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_BackendAttribute* attributes);
TritonStatus TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model);
TritonStatus TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model);
TritonStatus TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t request_count);

}  // extern "C"

#endif

extern "C" {
// Servers from 26.03 ask this on their ready endpoints; older ones never look for it.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance* instance);
}
