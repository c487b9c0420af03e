{{/*
What the schema cannot say of values is said here: before anything is installed, not by a pod that does
not start. Each problem is one line.
*/}}
{{- define "disagg-router.problems" -}}
{{- with .Values }}
{{- if not (or .router.enabled .engines.enabled) }}
router.enabled and engines.enabled are both false: nothing to install
{{- end }}
{{- if not (regexMatch "^[a-z]" (include "disagg-router.fullname" $)) }}
the release's name must begin with a letter, as a Service's has to: or say fullnameOverride
{{- end }}
{{- $ports := without (list (int .router.port) (int .router.livenessPort) (int .router.metricsPort) (ternary .admin.port 0 .admin.enabled | int)) 0 }}
{{- if ne (len (uniq $ports)) (len $ports) }}
router.port, router.livenessPort, router.metricsPort and admin.port must differ
{{- end }}
{{- $settings := .settings }}
{{- $sources := list "prefill" "prefiller-hosts" "prefiller-dns" "engines-file" }}
{{- $named := false }}
{{- range $sources }}{{- $named = or $named (hasKey $settings .) }}{{- end }}
{{- if not (or .discovery.enabled $named (not .router.enabled)) }}
discovery.enabled is false, and settings names no engines: {{ join " or " $sources }}
{{- end }}
{{- $isOff := eq (toString (get $settings "conversation-store")) "off" }}
{{- if and (gt (int (get $settings "workers")) 1) (not .redis.url) (not $isOff) }}
settings.workers above 1 needs redis.url, or settings.conversation-store "off": they share nothing else
{{- end }}
{{- if and .redis.url (hasKey $settings "conversation-store") }}
redis.url and settings.conversation-store are both set
{{- end }}
{{- if and .admin.enabled (not .admin.tokenSecret.name) }}
admin.enabled needs admin.tokenSecret.name, the Secret that holds its bearer token
{{- end }}
{{- if and .ui.enabled (not .ui.tokenSecret.name) }}
ui.enabled needs ui.tokenSecret.name, the Secret that holds the page's token
{{- end }}
{{- if and .httpRoute.enabled (not .httpRoute.parentRefs) }}
httpRoute.enabled needs httpRoute.parentRefs, the Gateway: [{name: public, namespace: gateways}]
{{- end }}
{{- if and .inferencePool.enabled (not .inferencePool.endpointPicker.name) }}
inferencePool.enabled needs inferencePool.endpointPicker.name, the picker's Service
{{- end }}
{{- if .autoscaling.enabled }}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) }}
autoscaling.minReplicas is more than autoscaling.maxReplicas
{{- end }}
{{- if not (or .autoscaling.targetCPU .autoscaling.metrics) }}
autoscaling.enabled needs autoscaling.targetCPU or autoscaling.metrics
{{- end }}
{{- end }}
{{- range $role := list "prefill" "decode" "both" }}
{{- with index $.Values.engines $role }}
{{- if and .maxReplicas (not $.Values.engines.enabled) }}
engines.{{ $role }}.maxReplicas needs engines.enabled
{{- end }}
{{- if and .maxReplicas (or (lt (int .replicas) 1) (lt (int .maxReplicas) (int .replicas))) }}
engines.{{ $role }}.maxReplicas needs engines.{{ $role }}.replicas from 1 to this number
{{- end }}
{{- end }}
{{- end }}
{{- if gt (int .engines.ucxPorts.first) (int .engines.ucxPorts.last) }}
engines.ucxPorts.first is more than engines.ucxPorts.last
{{- end }}
{{- end }}
{{- end -}}
