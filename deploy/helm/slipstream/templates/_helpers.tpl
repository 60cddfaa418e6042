{{- define "slipstream.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "slipstream.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "slipstream.isGroup" -}}
{{- if gt (int .Values.nodes.count) 1 }}true{{ end -}}
{{- end -}}

{{- /* the pods that serve: of several nodes the leaders, as workers answer no client */ -}}
{{- define "slipstream.servers" -}}
{{ include "slipstream.selector" . }}
{{- if include "slipstream.isGroup" . }}
app.kubernetes.io/component: leader
{{- end }}
{{- end -}}

{{- /* not the name of the Service: the controller makes a headless one of this name. Short, because a StatefulSet puts its
own name and a hash into a label of 63 characters */ -}}
{{- define "slipstream.group" -}}
{{ printf "%s-nodes" (include "slipstream.name" . | trunc 40 | trimSuffix "-") }}
{{- end -}}

{{- define "slipstream.ranks" -}}
{{ max 1 (int .Values.gpus) }}
{{- end -}}

{{- define "slipstream.stages" -}}
{{- if hasKey .Values.settings "pipeline_parallel_size" }}{{ int .Values.settings.pipeline_parallel_size }}{{ else }}1{{ end -}}
{{- end -}}

{{- /* what the schema cannot say, as it is about several values */ -}}
{{- define "slipstream.check" -}}
{{- $ranks := mul (int .Values.nodes.count) (int (include "slipstream.ranks" .)) }}
{{- if ne 0 (int (mod $ranks (max 1 (int (include "slipstream.stages" .))))) }}
{{- fail (printf "settings.pipeline_parallel_size; accepted: a divisor of nodes.count x gpus, %d" (int $ranks)) }}
{{- end }}
{{- if include "slipstream.isGroup" . }}
{{- if gt (int $ranks) 8 }}
{{- fail (printf "nodes.count x gpus is %d; accepted: up to 8 GPUs for a model" (int $ranks)) }}
{{- end }}
{{- if not .Values.nodes.secret }}
{{- fail "nodes.secret is missing; accepted with several nodes: the name of a secret with the key `secret`" }}
{{- end }}
{{- if .Values.podDisruptionBudget.enabled }}
{{- fail "podDisruptionBudget.enabled; accepted with several nodes: false, as the loss of one pod ends its group" }}
{{- end }}
{{- range list "tensor_parallel_size" "num_nodes" "rank_address" "rank_secret_file" }}
{{- if hasKey $.Values.settings . }}
{{- fail (printf "settings.%s; accepted with several nodes: leave it out, nodes and gpus say it" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.kvEvents.enabled (not .Values.kvEvents.routerLabels) }}
{{- fail "kvEvents.routerLabels is missing; accepted: labels of the router's pods, as events hold the token ids of prompts" }}
{{- end }}
{{- if and .Values.kvEvents.enabled (eq (int .Values.kvEvents.port) (int .Values.kvEvents.replayPort)) }}
{{- fail "kvEvents.replayPort is kvEvents.port; accepted: another port" }}
{{- end }}
{{- end -}}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "slipstream.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "slipstream.source" -}}
{{- if or (hasPrefix "/" .Values.model.source) (not .Values.volume.existingClaim) -}}
{{ .Values.model.source }}
{{- else -}}
{{ printf "%s/%s" .Values.volume.mountPath .Values.model.source }}
{{- end -}}
{{- end -}}

{{- /* the name that clients send, by which a router of events knows the model */ -}}
{{- define "slipstream.eventsModel" -}}
{{- if .Values.kvEvents.model -}}
{{ .Values.kvEvents.model }}
{{- else if .Values.model.aliases -}}
{{ first .Values.model.aliases }}
{{- else -}}
llm
{{- end -}}
{{- end -}}

{{- /* behind the image's entrypoint: `slipstream serve` starts the server, and the gateway once the model is ready */ -}}
{{- define "slipstream.arguments" -}}
- slipstream
- serve
- --model
- {{ include "slipstream.source" . | quote }}
- --host
- "0.0.0.0"
- --openai-port
- "9000"
{{- if include "slipstream.isGroup" . }}
- --set
- tensor_parallel_size={{ div (mul (int .Values.nodes.count) (int (include "slipstream.ranks" .))) (max 1 (int (include "slipstream.stages" .))) }}
- --set
- num_nodes={{ int .Values.nodes.count }}
- --set
- rank_address=0.0.0.0:29500
- --set
- rank_secret_file=/run/slipstream-ranks/secret
{{- if not (hasKey .Values.settings "node_start_timeout_s") }}
- --set
- node_start_timeout_s={{ int .Values.startupTimeoutSeconds }}
{{- end }}
{{- else if gt (int .Values.gpus) 1 }}
- --set
- tensor_parallel_size={{ div (int .Values.gpus) (max 1 (int (include "slipstream.stages" .))) }}
{{- end }}
{{- if .Values.kvEvents.enabled }}
- --set
- kv_events_endpoint=tcp://0.0.0.0:{{ int .Values.kvEvents.port }}
- --set
- kv_events_replay_endpoint=tcp://0.0.0.0:{{ int .Values.kvEvents.replayPort }}
- --set
- {{ printf "kv_events_topic=kv@$(POD_IP):9000@%s" (include "slipstream.eventsModel" .) | quote }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- --set
- {{ printf "%s=%s" $name (ternary (toJson $value) (toString $value) (kindIs "float64" $value)) | quote }}
{{- end }}
{{- if .Values.tracing.otlpEndpoint }}
- --set
- {{ printf "otlp_endpoint=%s" .Values.tracing.otlpEndpoint | quote }}
- --otlp-endpoint
- {{ .Values.tracing.otlpEndpoint | quote }}
{{- end }}
{{- range .Values.model.aliases }}
- --alias
- {{ printf "%s=llm" . | quote }}
{{- end }}
{{- $name := include "slipstream.name" . }}
{{- range concat (list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace)) .Values.gateway.allowedHosts }}
- --allowed-host
- {{ . | quote }}
{{- end }}
{{- if .Values.gateway.apiKeySecret }}
- --api-key-file
- /run/slipstream/keys
{{- end }}
{{- range .Values.gateway.extraArguments }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* of a group's other pods: their number and the leader's address are in the variables of the LeaderWorkerSet. They stay
until the leader's requests have ended */ -}}
{{- define "slipstream.workerArguments" -}}
- slipstream
- worker
- --secret-file
- /run/slipstream-ranks/secret
- --ranks
- {{ include "slipstream.ranks" . | quote }}
- --drain-timeout
- {{ sub (int .Values.terminationGracePeriodSeconds) 5 | quote }}
{{- end -}}

{{- define "slipstream.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if gt (int .Values.gpus) 0 }}
{{- $limits := merge (dict "nvidia.com/gpu" (int .Values.gpus)) (get $resources "limits" | default dict) }}
{{- $resources = merge (dict "limits" $limits) $resources }}
{{- end }}
{{- toYaml $resources }}
{{- end -}}
