{{- /* role: "" of a Deployment's pods; leader and worker of those that share a model. Leaders serve, workers have ranks */ -}}
{{- define "slipstream.pod" -}}
{{- $role := .role }}
{{- $isWorker := eq .role "worker" }}
{{- with .root }}
{{- $hasKeys := and .Values.gateway.apiKeySecret (not $isWorker) }}
{{- $hasEvents := and .Values.kvEvents.enabled (not $isWorker) }}
metadata:
  labels: {{- include "slipstream.labels" . | nindent 4 }}
    {{- if $role }}
    app.kubernetes.io/component: {{ $role }}
    {{- end }}
  {{- with .Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ int .Values.terminationGracePeriodSeconds }}
  securityContext: {{- toYaml .Values.podSecurityContext | nindent 4 }}
  containers:
    - name: slipstream
      image: {{ include "slipstream.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if $isWorker }}
      args: {{- include "slipstream.workerArguments" . | nindent 8 }}
      {{- else }}
      args: {{- include "slipstream.arguments" . | nindent 8 }}
      {{- end }}
      {{- if or .Values.model.hubTokenSecret $hasEvents }}
      env:
        {{- if .Values.model.hubTokenSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .Values.model.hubTokenSecret | quote }}, key: token}}
        {{- end }}
        {{- if $hasEvents }}
        - name: POD_IP # in the topic of the KV events
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
      {{- end }}
      {{- if not $isWorker }}
      ports:
        - {name: openai, containerPort: 9000}
        - {name: http, containerPort: 8000}
        - {name: grpc, containerPort: 8001}
        - {name: metrics, containerPort: 8002}
        {{- if $role }}
        - {name: ranks, containerPort: 29500}
        {{- end }}
        {{- if $hasEvents }}
        - {name: kv-events, containerPort: {{ int .Values.kvEvents.port }}}
        - {name: kv-replay, containerPort: {{ int .Values.kvEvents.replayPort }}}
        {{- end }}
      # the gateway starts when the model is ready, and is not ready while the engine is down (docs/operations.md)
      startupProbe:
        httpGet: {path: /ready, port: openai}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (int .Values.startupTimeoutSeconds) 5 }}
      readinessProbe:
        httpGet: {path: /ready, port: openai}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # an engine that dies is restarted in place: only a server that does not answer at all needs a new container
      livenessProbe:
        httpGet: {path: /v2/health/live, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      lifecycle:
        preStop: {exec: {command: [sleep, "5"]}} # until no proxy sends requests here any more
      {{- end }}
      resources: {{- include "slipstream.resources" . | nindent 8 }}
      securityContext: {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/slipstream}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- if .Values.volume.existingClaim }}
        - {name: models, mountPath: {{ .Values.volume.mountPath | quote }}, readOnly: {{ .Values.volume.readOnly }}}
        {{- end }}
        {{- if $role }}
        - {name: rank-secret, mountPath: /run/slipstream-ranks, readOnly: true}
        {{- end }}
        {{- if $hasKeys }}
        - {name: keys, mountPath: /run/slipstream, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: home
      emptyDir: {sizeLimit: {{ .Values.volume.cacheSize }}}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.volume.sharedMemorySize }}}
    {{- if .Values.volume.existingClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ .Values.volume.existingClaim | quote }}}
    {{- end }}
    {{- if $role }}
    - name: rank-secret
      secret: {secretName: {{ .Values.nodes.secret | quote }}, defaultMode: 288}
    {{- end }}
    {{- if $hasKeys }}
    - name: keys
      secret: {secretName: {{ .Values.gateway.apiKeySecret | quote }}, defaultMode: 288}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
