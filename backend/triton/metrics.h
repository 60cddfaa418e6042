// Metrics on Triton's /metrics endpoint.
//
// One MetricRegistry for the whole process: families are shared by models, and a metric lives as long as somebody
// holds it, so that counters survive a restart of the engine and vanish when the model is unloaded.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "api.h"
#include "wire.h"

namespace slipstream {

using Labels = std::vector<std::pair<std::string, std::string>>;

class Metric {
 public:
  // metric may be null: a server without metrics, or without histograms; recording then does nothing.
  Metric(TRITONSERVER_Metric* metric, MetricKind kind) : metric_(metric), kind_(kind) {}
  ~Metric();
  Metric(const Metric&) = delete;

  // Counter: add; histogram: observe; gauge: set, if it is of this engine.
  void record(double value, const void* engine);
  // A gauge is of the engine that came up last, from 0 on: the one that it replaced may still answer its requests.
  void take(const void* engine);
  // A gauge of this engine goes to 0.
  void clear(const void* engine) {
    if (kind_ == MetricKind::kGauge) record(0, engine);
  }

 private:
  TRITONSERVER_Metric* const metric_;
  const MetricKind kind_;
  std::mutex mutex_;               // of a gauge
  const void* engine_ = nullptr;  // whose value it shows
};

class MetricRegistry {
 public:
  ~MetricRegistry();
  // The metric of this family and these labels, made when nobody holds it yet.
  std::shared_ptr<Metric> acquire(const MetricSpec& spec, const Labels& more_labels);

 private:
  struct Family {
    TRITONSERVER_MetricFamily* family = nullptr;
    std::map<Labels, std::weak_ptr<Metric>> metrics;
  };

  std::mutex mutex_;
  std::map<std::string, Family> families_;
};

// What is known of an engine by the gauges that it reports; 0 while it has reported none.
struct EngineReports {
  std::atomic<double> sleep_level{0}, kv_blocks{0}, kv_host_blocks{0}, kv_block_tokens{0};

  // Tokens that its prefix cache holds at most.
  size_t num_cached_tokens() const { return static_cast<size_t>((kv_blocks + kv_host_blocks) * kv_block_tokens); }
};

// What one engine reports: its own metrics by their index in READY, and the three that only this side can know.  An
// engine that was loaded in place of another has the same metrics while that one lives: counters and histograms add up.
class ModelMetrics {
 public:
  // labels: of each of its metrics.  reports: what is kept of its gauges; outlives the calls of `record`.
  ModelMetrics(MetricRegistry& registry, Labels labels, EngineReports& reports);
  ~ModelMetrics() { clear_gauges(); }
  ModelMetrics(const ModelMetrics&) = delete;

  void engine_is_up();
  // Nothing runs and nothing waits any more: gauges go to 0, counters and histograms stay.
  void engine_is_down();
  void engine_restarts() { restarts_->record(1, this); }
  void engine_is_silent() { silences_->record(1, this); }

  // Metrics declared again by a restarted engine continue.
  void declare(const std::vector<MetricSpec>& specs);
  // A METRICS frame.  Throws ProtocolError.
  void record(std::string_view payload);

 private:
  void clear_gauges();

  MetricRegistry& registry_;
  const Labels labels_;
  EngineReports& reports_;
  std::shared_ptr<Metric> up_, restarts_, silences_;
  std::vector<std::shared_ptr<Metric>> declared_;
  std::map<size_t, std::atomic<double>*> reported_;  // by index in READY
};

}  // namespace slipstream
