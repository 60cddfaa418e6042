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
{{- if gt (int .Values.gpus) 1 }}
- --set
- tensor_parallel_size={{ int .Values.gpus }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- --set
- {{ printf "%s=%v" $name $value | quote }}
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


{{- define "slipstream.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if gt (int .Values.gpus) 0 }}
{{- $limits := merge (dict "nvidia.com/gpu" (int .Values.gpus)) (get $resources "limits" | default dict) }}
{{- $resources = merge (dict "limits" $limits) $resources }}
{{- end }}
{{- toYaml $resources }}
{{- end -}}
