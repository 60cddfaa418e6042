#include "metrics.h"

#include <dlfcn.h>

#include <algorithm>

#include "status.h"

struct TRITONSERVER_MetricArgs;  // the headers before r24.09 know no histograms

namespace slipstream {
namespace {

// Histograms came with r24.09: looked up at run time, so that older servers still load this backend.
struct HistogramApi {
  TRITONSERVER_Error* (*args_new)(TRITONSERVER_MetricArgs**) = nullptr;
  TRITONSERVER_Error* (*args_set)(TRITONSERVER_MetricArgs*, const double*, const uint64_t) = nullptr;
  TRITONSERVER_Error* (*args_delete)(TRITONSERVER_MetricArgs*) = nullptr;
  TRITONSERVER_Error* (*metric_new)(
      TRITONSERVER_Metric**, TRITONSERVER_MetricFamily*, const TRITONSERVER_Parameter**, const uint64_t,
      const TRITONSERVER_MetricArgs*) = nullptr;
  TRITONSERVER_Error* (*observe)(TRITONSERVER_Metric*, double) = nullptr;

  HistogramApi() {
    look_up(args_new, "TRITONSERVER_MetricArgsNew");
    look_up(args_set, "TRITONSERVER_MetricArgsSetHistogram");
    look_up(args_delete, "TRITONSERVER_MetricArgsDelete");
    look_up(metric_new, "TRITONSERVER_MetricNewWithArgs");
    look_up(observe, "TRITONSERVER_MetricObserve");
  }
  bool is_complete() const { return args_new && args_set && args_delete && metric_new && observe; }

 private:
  template <typename Function>
  static void look_up(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
};

const HistogramApi& histogram_api() {
  static const HistogramApi api;
  return api;
}

TRITONSERVER_MetricKind triton_kind(MetricKind kind) {
  if (kind == MetricKind::kCounter) return TRITONSERVER_METRIC_KIND_COUNTER;
  constexpr auto kHistogram = static_cast<TRITONSERVER_MetricKind>(2);
  return kind == MetricKind::kGauge ? TRITONSERVER_METRIC_KIND_GAUGE : kHistogram;
}

TRITONSERVER_Error* new_histogram(
    TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family, std::vector<const TRITONSERVER_Parameter*>& labels,
    const std::vector<double>& bounds) {
  const HistogramApi& api = histogram_api();
  TRITONSERVER_MetricArgs* args = nullptr;
  TRITONSERVER_Error* error = api.args_new(&args);
  if (error != nullptr) return error;
  error = api.args_set(args, bounds.data(), bounds.size());
  if (error == nullptr) error = api.metric_new(metric, family, labels.data(), labels.size(), args);
  log_if_failed(api.args_delete(args), "histogram arguments");
  return error;
}

TRITONSERVER_Metric* new_metric(TRITONSERVER_MetricFamily* family, const MetricSpec& spec, const Labels& labels) {
  std::vector<const TRITONSERVER_Parameter*> parameters;
  for (const auto& [name, value] : labels) {
    parameters.push_back(TRITONSERVER_ParameterNew(name.c_str(), TRITONSERVER_PARAMETER_STRING, value.c_str()));
  }
  TRITONSERVER_Metric* metric = nullptr;
  TRITONSERVER_Error* error = spec.kind == MetricKind::kHistogram
                                  ? new_histogram(&metric, family, parameters, spec.bounds)
                                  : TRITONSERVER_MetricNew(&metric, family, parameters.data(), parameters.size());
  for (const TRITONSERVER_Parameter* parameter : parameters) {
    TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(parameter));
  }
  log_if_failed(error, spec.family.c_str());
  return metric;
}

}  // namespace

Metric::~Metric() {
  if (metric_ != nullptr) log_if_failed(TRITONSERVER_MetricDelete(metric_), "cannot delete a metric");
}

void Metric::take(const void* engine) {
  if (kind_ != MetricKind::kGauge) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    engine_ = engine;
  }
  clear(engine);
}

void Metric::record(double value, const void* engine) {
  if (metric_ == nullptr) return;
  TRITONSERVER_Error* error = nullptr;
  if (kind_ == MetricKind::kCounter) error = TRITONSERVER_MetricIncrement(metric_, value);
  if (kind_ == MetricKind::kGauge) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (engine_ == engine) error = TRITONSERVER_MetricSet(metric_, value);
  }
  if (kind_ == MetricKind::kHistogram) error = histogram_api().observe(metric_, value);
  if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

MetricRegistry::~MetricRegistry() {
  for (const auto& [name, family] : families_) {
    if (family.family != nullptr) log_if_failed(TRITONSERVER_MetricFamilyDelete(family.family), name.c_str());
  }
}

std::shared_ptr<Metric> MetricRegistry::acquire(const MetricSpec& spec, const Labels& more_labels) {
  Labels labels = spec.labels;
  labels.insert(labels.end(), more_labels.begin(), more_labels.end());
  std::sort(labels.begin(), labels.end());
  const bool is_possible = spec.kind != MetricKind::kHistogram || histogram_api().is_complete();

  std::lock_guard<std::mutex> lock(mutex_);
  auto [found, is_new] = families_.try_emplace(spec.family);
  Family& family = found->second;
  if (is_new && is_possible) {
    const char* name = spec.family.c_str();
    log_if_failed(TRITONSERVER_MetricFamilyNew(&family.family, triton_kind(spec.kind), name, spec.help.c_str()), name);
  }
  if (std::shared_ptr<Metric> held = family.metrics[labels].lock()) return held;
  // a family may be there of another kind: a histogram needs its functions all the same
  const bool can_make = is_possible && family.family != nullptr;
  TRITONSERVER_Metric* metric = can_make ? new_metric(family.family, spec, labels) : nullptr;
  auto made = std::make_shared<Metric>(metric, spec.kind);
  family.metrics[labels] = made;
  return made;
}

ModelMetrics::ModelMetrics(MetricRegistry& registry, Labels labels, EngineReports& reports)
    : registry_(registry), labels_(std::move(labels)), reports_(reports) {
  up_ = registry.acquire(
      {"slipstream_engine_up", MetricKind::kGauge, "1 while the model's engine process serves, else 0", {}, {}},
      labels_);
  restarts_ = registry.acquire(
      {"slipstream_engine_restarts_total",
       MetricKind::kCounter,
       "Restarts of the engine process after it died",
       {},
       {}},
      labels_);
  silences_ = registry.acquire(
      {"slipstream_engine_silences_total",
       MetricKind::kCounter,
       "Times that the engine had requests and sent nothing for 60 s",
       {},
       {}},
      labels_);
}

void ModelMetrics::engine_is_up() {
  for (const std::shared_ptr<Metric>& metric : declared_) metric->take(this);
  up_->take(this);
  up_->record(1, this);
}

void ModelMetrics::engine_is_down() {
  reports_.sleep_level = 0;
  clear_gauges();
}

void ModelMetrics::declare(const std::vector<MetricSpec>& specs) {
  std::vector<std::shared_ptr<Metric>> declared;
  for (const MetricSpec& spec : specs) declared.push_back(registry_.acquire(spec, labels_));
  declared_ = std::move(declared);
  const std::map<std::string, std::atomic<double>*> kept = {
      {"slipstream_sleep_level", &reports_.sleep_level},
      {"slipstream_kv_blocks_total", &reports_.kv_blocks},
      {"slipstream_kv_host_blocks_total", &reports_.kv_host_blocks},
      {"slipstream_kv_block_tokens", &reports_.kv_block_tokens}};
  reported_.clear();
  for (size_t index = 0; index < specs.size(); ++index) {
    if (const auto found = kept.find(specs[index].family); found != kept.end()) reported_[index] = found->second;
  }
}

void ModelMetrics::record(std::string_view payload) {
  PayloadReader reader(payload);
  for (uint16_t left = reader.u16(); left > 0; --left) {
    const uint16_t index = reader.u16();
    if (index >= declared_.size()) throw ProtocolError("a metric index is out of range");
    const auto reported = reported_.find(index);
    for (uint32_t values = reader.u32(); values > 0; --values) {
      const double value = reader.f64();
      declared_[index]->record(value, this);
      if (reported != reported_.end()) *reported->second = value;
    }
  }
  reader.finish();
}

void ModelMetrics::clear_gauges() {
  up_->record(0, this);
  for (const std::shared_ptr<Metric>& metric : declared_) metric->clear(this);
}

}  // namespace slipstream
