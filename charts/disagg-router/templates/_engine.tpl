{{/* The engine pools of this release, as a JSON array: one of both roles, or one of each role. */}}
{{- define "disagg-router.pools" -}}
{{- with .Values.engines -}}
{{- $pools := ternary (list "both") (list "prefill" "decode") (gt (int .both.replicas) 0) -}}
{{- ternary $pools list .enabled | toJson -}}
{{- end -}}
{{- end -}}

{{/* The Deployment of one role's engines: (dict "root" $ "role" "prefill" "engine" .Values...) */}}
{{- define "disagg-router.engine" -}}
{{- $root := .root }}
{{- $engine := .engine }}
{{- $component := dict "root" $root "component" .role }}
{{- $role := .role }}
{{- $tiny := include "disagg-router.makesTinyModel" $root }}
{{- with $root.Values.engines }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "disagg-router.fullname" $root }}-{{ $role }}
  labels:
    {{- include "disagg-router.labels" $component | nindent 4 }}
spec:
  {{- if not $engine.maxReplicas }}
  replicas: {{ $engine.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "disagg-router.selector" $component | nindent 6 }}
  strategy:
    {{- toYaml $engine.strategy | nindent 4 }}
  progressDeadlineSeconds: {{ add .startupTimeout .preStop .shutdownTimeout 60 }}
  template:
    metadata:
      labels:
        {{- include "disagg-router.selector" $component | nindent 8 }}
        llm-d.ai/role: {{ ternary "decode" $role (eq $role "both") }}
        {{- if eq $role "both" }}
        disagg-router.io/role: both
        {{- end }}
        disagg-router.io/engines: {{ $root.Release.Name | quote }}
        {{- with .group }}
        disagg-router.io/group: {{ . | quote }}
        {{- end }}
      {{- with .podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ add .preStop .shutdownTimeout 15 }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      {{- if $tiny }}
      initContainers:
        - name: model
          image: {{ include "disagg-router.image" (dict "root" $root "image" .image) | quote }}
          imagePullPolicy: {{ .image.pullPolicy }}
          command: [python, -m, engine_ext.reference.tiny_model, /cache/tiny]
          resources:
            {{- toYaml $engine.resources | nindent 12 }}
          securityContext:
            {{- toYaml $root.Values.securityContext | nindent 12 }}
          volumeMounts:
            - {name: cache, mountPath: /cache}
            - {name: tmp, mountPath: /tmp}
      {{- end }}
      containers:
        - name: engine
          image: {{ include "disagg-router.image" (dict "root" $root "image" .image) | quote }}
          imagePullPolicy: {{ .image.pullPolicy }}
          {{- include "disagg-router.engineCommand" (dict "root" $root "role" $role "engine" $engine) | nindent 10 }}
          env:
            {{- include "disagg-router.engineEnv" $root | nindent 12 }}
          ports:
            - name: http
              containerPort: {{ .port }}
              protocol: TCP
            - name: side-channel
              containerPort: {{ .sideChannelPort }}
              protocol: TCP
          startupProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ max 1 (div (add .startupTimeout 4) 5) }}
          livenessProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 10
            timeoutSeconds: 10
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 3
          lifecycle:
            preStop:
              exec: {command: [sleep, {{ .preStop | quote }}]}
          resources:
            {{- include "disagg-router.engineResources" (dict "root" $root "engine" $engine) | nindent 12 }}
          securityContext:
            {{- toYaml $root.Values.securityContext | nindent 12 }}
          volumeMounts:
            - {name: cache, mountPath: /cache}
            - {name: tmp, mountPath: /tmp}
            - {name: shared-memory, mountPath: /dev/shm}
            {{- if .modelVolume.claim }}
            - {name: models, mountPath: {{ .modelVolume.path | quote }}, readOnly: true}
            {{- end }}
            {{- if include "disagg-router.sideChannelSecret" $root }}
            - {name: side-channel-secret, mountPath: /etc/disagg, readOnly: true}
            {{- end }}
      volumes:
        - name: cache
          {{- if .cache.claim }}
          persistentVolumeClaim: {claimName: {{ .cache.claim | quote }}}
          {{- else }}
          emptyDir: {sizeLimit: {{ .cache.size }}}
          {{- end }}
        - name: tmp
          emptyDir: {}
        - name: shared-memory
          emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
        {{- if .modelVolume.claim }}
        - name: models
          persistentVolumeClaim: {claimName: {{ .modelVolume.claim | quote }}, readOnly: true}
        {{- end }}
        {{- with include "disagg-router.sideChannelSecret" $root }}
        - name: side-channel-secret
          secret:
            secretName: {{ . | quote }}
            defaultMode: 0440
            items: [{key: {{ $root.Values.engines.sideChannelSecret.key | quote }}, path: secret}]
        {{- end }}
      {{- with $engine.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $engine.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $engine.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end }}
{{- end -}}

{{/* Not empty where the pod makes its own model. */}}
{{- define "disagg-router.makesTinyModel" -}}
{{- with .Values.engines }}{{ if and (eq .runtime "reference") (eq .model "tiny") }}yes{{ end }}{{ end -}}
{{- end -}}

{{/* The Secret that engines share: the operator's, or the chart's own; empty: none. */}}
{{- define "disagg-router.sideChannelSecret" -}}
{{- with .Values.engines.sideChannelSecret -}}
{{- if .name -}}{{ .name }}{{- else if .create -}}{{ include "disagg-router.fullname" $ }}-side-channel{{- end -}}
{{- end -}}
{{- end -}}

{{/* What moves KV, as --kv-transfer-config wants it. */}}
{{- define "disagg-router.kvTransferConfig" -}}
{{- with .root.Values.engines -}}
{{- $extra := deepCopy .connectorExtraConfig -}}
{{- if include "disagg-router.sideChannelSecret" $.root -}}
{{- $_ := set $extra "side_channel_secret_file" "/etc/disagg/secret" -}}
{{- end -}}
{{- if and (eq .role "both") (not (hasKey $extra "target_itl_ms")) -}}
{{- $_ := set $extra "target_itl_ms" 50 -}}
{{- end -}}
{{- $config := dict "kv_connector" .connector "kv_role" "kv_both" "kv_connector_extra_config" $extra -}}
{{- if eq .runtime "vllm" -}}
{{- $_ := set $config "kv_connector_module_path" "engine_ext.vllm" -}}
{{- end -}}
{{- if ne $.role "prefill" -}}
{{- $_ := set $config "kv_load_failure_policy" "recompute" -}}
{{- end -}}
{{- toJson $config -}}
{{- end -}}
{{- end -}}

{{- define "disagg-router.engineCommand" -}}
{{- with .root.Values.engines -}}
{{- if eq .runtime "vllm" -}}
command: [vllm, serve]
args:
  - {{ .model | quote }}
  - --tensor-parallel-size={{ $.engine.tensorParallelSize }}
  - --scheduler-cls=engine_ext.vllm.scheduler.DisaggAsyncScheduler
{{- else -}}
command: [disagg-engine]
args:
  - {{ printf "--model=%s" (ternary "/cache/tiny" .model (eq .model "tiny")) | quote }}
  - --device=cpu
{{- end }}
  - --host=0.0.0.0
  - --port={{ .port }}
  {{- with .servedModelName }}
  - {{ printf "--served-model-name=%s" . | quote }}
  {{- end }}
  - --shutdown-timeout={{ .shutdownTimeout }}
  - --kv-transfer-config
  - {{ include "disagg-router.kvTransferConfig" $ | quote }}
  {{- with $.engine.args }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "disagg-router.engineEnv" -}}
{{- with .Values.engines -}}
- name: VLLM_NIXL_SIDE_CHANNEL_HOST # the address that other engines dial
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: {{ .sideChannelPort | quote }}}
- {name: UCX_NET_DEVICES, value: all}
- {name: UCX_TCP_PORT_RANGE, value: "{{ .ucxPorts.first }}-{{ .ucxPorts.last }}"}
- {name: USER, value: disagg} # torch names its cache after it
- {name: HOME, value: /cache}
- {name: HF_HOME, value: /cache/huggingface}
- {name: XDG_CACHE_HOME, value: /cache}
{{- with .hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      {{- toYaml . | nindent 6 }}
{{- end }}
{{- end }}
{{- with .env }}
{{ toYaml . }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The operator's, with a GPU for each rank and a network device; these are asked for in limits. */}}
{{- define "disagg-router.engineResources" -}}
{{- $resources := deepCopy .engine.resources -}}
{{- $limits := deepCopy (default dict $resources.limits) -}}
{{- with .root.Values.engines -}}
{{- if eq .runtime "vllm" -}}
{{- $_ := set $limits $.engine.gpuResource (toString $.engine.tensorParallelSize) -}}
{{- end -}}
{{- with .rdma -}}
{{- if .resource -}}
{{- $_ := set $limits .resource (toString .count) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $resources "limits" $limits -}}
{{- toYaml $resources -}}
{{- end -}}
