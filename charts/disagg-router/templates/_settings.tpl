{{/*
The router's configuration file: what operators say in `settings`, over the defaults that suit a pod,
under what other parts of the chart depend on.
*/}}
{{- define "disagg-router.settings" -}}
{{- $defaults := dict "host" "0.0.0.0" "log-format" "json" -}}
{{- $owned := dict
      "port" .Values.router.port
      "liveness-port" .Values.router.livenessPort
      "shutdown-delay" .Values.router.shutdownDelay
      "shutdown-timeout" .Values.router.shutdownTimeout -}}
{{- with .Values.router.metricsPort }}
{{- $_ := set $owned "metrics-port" . }}
{{- $_ := set $owned "metrics-host" (get $.Values.settings "host" | default "0.0.0.0") }}
{{- end }}
{{- with .Values.discovery }}
{{- if .enabled }}
{{- $_ := set $owned "kubernetes-namespace" (include "disagg-router.watched" $) }}
{{- $_ := set $owned "kubernetes-prefill-selector" .prefillSelector }}
{{- $_ := set $owned "kubernetes-decode-selector" .decodeSelector }}
{{- $_ := set $owned "kubernetes-port" (toString .port) }}
{{- end }}
{{- end }}
{{- with .Values.redis }}
{{- if .url }}
{{- $_ := set $owned "conversation-store" .url }}
{{- end }}
{{- if .passwordSecret.name }}
{{- $_ := set $owned "conversation-store-password-file" "/etc/disagg-router/secrets/redis-password" }}
{{- end }}
{{- if .signingKeySecret.name }}
{{- $_ := set $owned "conversation-store-key-file" "/etc/disagg-router/secrets/signing-key" }}
{{- end }}
{{- end }}
{{- with .Values.keys }}
{{- if .fileSecret.name }}
{{- $_ := set $owned "api-keys-file" "/etc/disagg-router/secrets/api-keys" }}
{{- end }}
{{- if .engineKeySecret.name }}
{{- $_ := set $owned "engine-api-key-file" "/etc/disagg-router/secrets/engine-key" }}
{{- end }}
{{- end }}
{{- if .Values.tls.secret }}
{{- $_ := set $owned "tls-certfile" "/etc/disagg-router/secrets/tls.crt" }}
{{- $_ := set $owned "tls-keyfile" "/etc/disagg-router/secrets/tls.key" }}
{{- end }}
{{- with .Values.admin }}
{{- if .enabled }}
{{- $_ := set $owned "admin-port" .port }}
{{- end }}
{{- end }}
{{- with .Values.ui }}
{{- if .enabled }}
{{- $_ := set $owned "ui" true }}
{{- $_ := set $owned "ui-token-file" "/etc/disagg-router/secrets/ui-token" }}
{{- end }}
{{- end }}
{{- mergeOverwrite $defaults .Values.settings $owned | toYaml -}}
{{- end -}}

{{/* The name of the port that /metrics is scraped on. */}}
{{- define "disagg-router.metricsPort" -}}
{{- ternary "metrics" "liveness" (gt (int .Values.router.metricsPort) 0) -}}
{{- end -}}

{{/* Secrets that are mounted as files: a list of projections, empty where there is none. */}}
{{- define "disagg-router.secretFiles" -}}
{{- $files := concat
      (list (merge (dict "path" "redis-password") .Values.redis.passwordSecret)
            (merge (dict "path" "signing-key") .Values.redis.signingKeySecret)
            (merge (dict "path" "api-keys") .Values.keys.fileSecret)
            (merge (dict "path" "engine-key") .Values.keys.engineKeySecret)
            (dict "name" .Values.tls.secret "key" "tls.crt" "path" "tls.crt")
            (dict "name" .Values.tls.secret "key" "tls.key" "path" "tls.key")
            (ternary (merge (dict "path" "admin-token") .Values.admin.tokenSecret) dict .Values.admin.enabled)
            (ternary (merge (dict "path" "ui-token") .Values.ui.tokenSecret) dict .Values.ui.enabled))
      .Values.router.secretFiles -}}
{{- range $files }}
{{- if .name }}
- secret:
    name: {{ .name | quote }}
    items: [{key: {{ .key | quote }}, path: {{ .path | quote }}}]
{{- end }}
{{- end }}
{{- end -}}
