{{- define "disagg-router.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for -prefill, -decode and the like behind it. */}}
{{- define "disagg-router.fullname" -}}
{{- $name := include "disagg-router.name" . -}}
{{- $default := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $default .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* What selects the pods of one component: (dict "root" $ "component" "router"). Never changes. */}}
{{- define "disagg-router.selector" -}}
app.kubernetes.io/name: {{ include "disagg-router.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* For objects, not for pods: a new version of the chart alone is no reason to restart an engine. */}}
{{- define "disagg-router.labels" -}}
{{ include "disagg-router.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* (dict "root" $ "image" .Values.image) */}}
{{- define "disagg-router.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "disagg-router.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "disagg-router.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "disagg-router.watched" -}}
{{ default .Release.Namespace .Values.discovery.namespace }}
{{- end -}}

{{/* k=v,k=v as a map. */}}
{{- define "disagg-router.matchLabels" -}}
{{- range splitList "," . }}
{{- $pair := splitn "=" 2 . }}
{{ $pair._0 }}: {{ $pair._1 | quote }}
{{- end }}
{{- end -}}
