{{- define "relaygr.fullname" -}}
{{- if contains "relaygr" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-relaygr" (.Release.Name | trunc 32 | trimSuffix "-") }}{{ end }}
{{- end }}

{{/* Labels of one role's objects: dict "root" "role". */}}
{{- define "relaygr.selector" -}}
app.kubernetes.io/name: relaygr
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "relaygr.labels" -}}
{{ include "relaygr.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* A size of the settings (bytes, 512MiB, 2GB) in MiB, rounded up: dict "key" "value". */}}
{{- define "relaygr.mib" -}}
{{- $text := .value | toString -}}
{{- if or (kindIs "float64" .value) (kindIs "int64" .value) (kindIs "int" .value) }}{{ $text = .value | int64 | toString }}{{ end -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $unit := $text | trimPrefix $number | trim | lower -}}
{{- $bytes := dict "" 1 "b" 1 "kib" 1024 "mib" 1048576 "gib" 1073741824 "tib" 1099511627776 "kb" 1000 "mb" 1000000 "gb" 1000000000 "tb" 1000000000000 -}}
{{- if or (not $number) (not (hasKey $bytes $unit)) }}{{ fail (printf "%s is %q: write a size such as 512MiB or 2GiB" .key $text) }}{{ end -}}
{{- divf (mulf (float64 $number) (get $bytes $unit)) 1048576 | ceil | int64 -}}
{{- end }}

{{/* Memory of one worker, in MiB, as YAML: tmpfs, history, limit. dict "role" "own" (its values) "settings" (of `worker`). */}}
{{- define "relaygr.memory" -}}
{{- $at := eq .role "pre-infer" | ternary "preInfer.settings" "settings.worker" -}}
{{- $hbm := include "relaygr.mib" (dict "key" (printf "%s.hbm_bytes" $at) "value" .settings.hbm_bytes) | int64 -}}
{{- $dram := include "relaygr.mib" (dict "key" (printf "%s.dram_bytes" $at) "value" .settings.dram_bytes) | int64 -}}
{{- $history := include "relaygr.mib" (dict "key" (printf "%s.history_max_bytes" $at) "value" .settings.history_max_bytes) | int64 -}}
{{- $each := include "relaygr.mib" (dict "key" (eq .role "pre-infer" | ternary "preInfer.memory.beside" "worker.memory.beside") "value" .own.memory.beside) | int64 -}}
{{- if eq .settings.device "cpu" }}{{ $each = add $each $hbm }}{{ end -}}
{{- $processes := ternary 2 1 .own.standby -}}
{{/* A tenth for the index of the tier, and the lock and status files. */}}
{{- $tmpfs := add $dram (div (add $dram 9) 10) 16 -}}
tmpfs: {{ $tmpfs }}
history: {{ $history }}
{{/* A worker refuses a plan that leaves less than a tenth of the free memory. */}}
limit: {{ add $tmpfs (div (add $dram 9) 10) $history (mul $processes $each) }}
{{- end }}

{{/* The roles that run with these values. */}}
{{- define "relaygr.roles" -}}
worker trigger{{ if .Values.preInfer.replicas }} pre-infer{{ end }}{{ range $role := list "lag" "gateway" "ui" }}{{ if (get $.Values $role).enabled }} {{ $role }}{{ end }}{{ end }}{{ if and .Values.topics.job (not .Values.strimzi.topics) }} topics{{ end }}
{{- end }}

{{/* Stops with a message where values contradict each other. */}}
{{- define "relaygr.check" -}}
{{- $settings := .Values.settings -}}
{{- if not $settings.bootstrap }}{{ fail "settings.bootstrap is empty: set it to HOST:PORT[,HOST:PORT...] of the Kafka cluster" }}{{ end -}}
{{- range $key := list "worker.worker_id" "worker.model" "worker.history_path" "worker.shared_path" "worker.http_host" "worker.http_port" "worker.metrics_url" "trigger.instance_id" "trigger.http_host" "trigger.http_port" "lag.http_host" "lag.http_port" "gateway.gateway_id" "gateway.listen_host" "gateway.listen_port" "gateway.http_host" "gateway.http_port" "ui.http_host" "ui.http_port" -}}
{{- $path := splitList "." $key -}}
{{- if hasKey (get $settings (first $path) | default dict) (last $path) }}{{ fail (printf "settings.%s is set by the chart: remove it" $key) }}{{ end -}}
{{- end -}}
{{- range $key := list "worker.cpu" "worker.memory.limit" "worker.history.size" "preInfer.cpu" "preInfer.memory.limit" "preInfer.history.size" "model.size" "pool.holder.cpu" -}}
{{- $value := $.Values -}}
{{- range splitList "." $key }}{{ $value = get ($value | default dict) . }}{{ end -}}
{{- if not (regexMatch "^([0-9]+(\\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?)?$" (toString $value)) }}{{ fail (printf "%s is %q: write a quantity of Kubernetes, such as 8Gi of memory, or 500m of a CPU" $key (toString $value)) }}{{ end -}}
{{- end -}}
{{- range $key := list "sasl_password" "key_password" -}}
{{- if hasKey ($settings.security | default dict) $key }}{{ fail (printf "settings.security.%s would be readable in a ConfigMap: put it into a Secret, and set RELAYGR_SECURITY__%s from it by extraEnv (or name the file of a password in settings.security.sasl_password_file)" $key (upper $key)) }}{{ end -}}
{{- end -}}
{{- range $role := list "gateway" "ui" -}}
{{- if hasKey (get $settings $role | default dict) "token" }}{{ fail (printf "settings.%s.token would be readable in a ConfigMap: put it into a Secret with the key `token`, and name the Secret in %s.tokenSecret" $role $role) }}{{ end -}}
{{- $own := get $.Values $role -}}
{{- if and $own.enabled (not $own.tokenSecret) }}{{ fail (printf "%s.tokenSecret is empty: name the Secret whose key `token` has the token that callers of the %s must give, at least 16 characters" $role $role) }}{{ end -}}
{{- end -}}
{{- if .Values.pool.enabled -}}
{{- if not .Values.pool.secret }}{{ fail "pool.secret is empty: name the Secret whose key `secret` has at least 16 random bytes" }}{{ end -}}
{{- range $key := list "store" "address" "protocol" "secret_file" -}}
{{- if hasKey ($settings.worker.pool | default dict) $key }}{{ fail (printf "settings.worker.pool.%s is set by the chart with pool.enabled: remove one of them (a protocol is the value pool.protocol)" $key) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if .Values.preInfer.replicas -}}
{{- if not (or .Values.pool.enabled (dig "pool" "store" "" $settings.worker) (dig "pool" "address" "" $settings.worker)) }}{{ fail "preInfer.replicas is set, but there is no pool for the prefixes: set pool.enabled to true, or settings.worker.pool.store" }}{{ end -}}
{{- if not (include "relaygr.usesPool" .) }}{{ fail "preInfer.replicas is set, but every scenario of this release has `pre_infer: owner`, so pre-infer workers would get no jobs: set settings.scenarios.NAME.pre_infer to pool, or preInfer.replicas to 0" }}{{ end -}}
{{- end -}}
{{- if and (eq ($settings.affinity | default "range") "consumer_protocol") (or .Values.worker.standby .Values.worker.leaveOnStop) }}{{ fail "settings.affinity is consumer_protocol: set worker.standby and worker.leaveOnStop to false, or use another affinity" }}{{ end -}}
{{- if and (eq ($settings.affinity | default "range") "one_topic") (or .Values.strimzi.topics .Values.strimzi.users) }}{{ fail "settings.affinity is one_topic: set strimzi.topics to false and strimzi.users to [], and grant the rights that `relaygr topics acls` prints" }}{{ end -}}
{{- $protocol := ($settings.security | default dict).protocol | default "PLAINTEXT" -}}
{{- $wanted := eq .Values.strimzi.authentication "tls" | ternary "SSL" "SASL_SSL or SASL_PLAINTEXT" -}}
{{- if and .Values.strimzi.users (not (has $protocol (splitList " or " $wanted))) }}{{ fail (printf "strimzi.users have %s credentials, but settings.security.protocol is %s: set it to %s, as the listener of settings.bootstrap has it" .Values.strimzi.authentication $protocol $wanted) }}{{ end -}}
{{- $most := .Values.worker.replicas -}}
{{- if .Values.keda.worker.enabled }}{{ $most = .Values.keda.worker.max }}{{ end -}}
{{- if gt (int $most) (int $settings.partitions) }}{{ fail (printf "%d workers share settings.partitions = %d partitions: plan at least 8 partitions for each worker" (int $most) (int $settings.partitions)) }}{{ end -}}
{{- $models := list -}}
{{- range $key := list "volume" "source" "random" -}}
{{- if get $.Values.model $key }}{{ $models = append $models (printf "model.%s" $key) }}{{ end -}}
{{- end -}}
{{- if not $models }}{{ fail "model.volume is empty: name the volume with the checkpoint (config.json, model.safetensors), set model.source to a URL of it, or set model.random to try the chart with a random model" }}{{ end -}}
{{- if gt (len $models) 1 }}{{ fail (printf "%s are set: set one of them" (join " and " $models)) }}{{ end -}}
{{- if and .Values.networkPolicy.enabled .Values.model.source (not .Values.networkPolicy.egress) }}{{ fail "model.source is set, but networkPolicy would keep workers from it: allow its address in networkPolicy.egress" }}{{ end -}}
{{- range $key := list "ca_file" "certificate_file" "key_file" "sasl_password_file" "sasl_token_file" -}}
{{- $file := get ($settings.security | default dict) $key | default "" -}}
{{- if and (hasPrefix "/etc/relaygr/ca/" $file) (not $.Values.security.caSecret) }}{{ fail (printf "settings.security.%s is %s, but security.caSecret is empty: name the Secret with that file" $key $file) }}{{ end -}}
{{- range $role := include "relaygr.roles" $ | splitList " " -}}
{{- if and (hasPrefix "/etc/relaygr/security/" $file) (not (include "relaygr.secret" (dict "root" $ "role" $role))) }}{{ fail (printf "settings.security.%s is %s, but no Secret is mounted there in %s: set security.secret or security.roles.%s.secret" $key $file $role $role) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (dig "tracing" "enabled" false $settings) (not .Values.networkPolicy.egress) }}{{ fail "settings.tracing is enabled, but networkPolicy would drop its traces: allow your collector in networkPolicy.egress" }}{{ end -}}
{{- if and .Values.worker.terminationGracePeriodSeconds (lt (float64 .Values.worker.terminationGracePeriodSeconds) (addf $settings.worker.drain_s 25)) }}{{ fail "worker.terminationGracePeriodSeconds is too short: set it to at least settings.worker.drain_s and 25 s" }}{{ end -}}
{{- if and (or .Values.keda.trigger.enabled .Values.keda.worker.enabled) (not .Values.keda.prometheus) }}{{ fail "keda.prometheus is empty: set it to the address of Prometheus" }}{{ end -}}
{{- if and .Values.keda.trigger.enabled (not .Values.lag.enabled) }}{{ fail "keda.trigger reads the lag monitor's metrics: set lag.enabled to true" }}{{ end -}}
{{- if and .Values.strimzi.users .Values.topics.job (not .Values.strimzi.topics) (not (get .Values.security.roles "topics")) }}{{ fail "strimzi.users is set, but topics.job has no user: set strimzi.topics to true, topics.job to false, or security.roles.topics to a user that may create topics" }}{{ end -}}
{{- range $section := list "trigger" "worker" -}}
{{- $own := get $.Values.keda $section -}}
{{- if and $own.enabled (gt (int $own.min) (int $own.max)) }}{{ fail (printf "keda.%s.min is larger than keda.%s.max" $section $section) }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Whether jobs of a scenario that the release serves go to pre-infer workers: "true", or nothing. */}}
{{- define "relaygr.usesPool" -}}
{{- $scenarios := .Values.settings.scenarios | default dict -}}
{{- $parts := .Values.settings.scenario | default "" | splitList "/" -}}
{{- $served := dig (first $parts) "topic_prefix" "" $scenarios | default "" -}}
{{- range $name, $own := $scenarios -}}
{{- $is_served := gt (len $parts) 1 | ternary (eq $name (first $parts)) (eq ($own.topic_prefix | default "") $served) -}}
{{- if and $is_served (eq ($own.pre_infer | default "owner") "pool") }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* The prefixes of the release's topics, groups and histories, as relaygr.settings finds them: YAML. */}}
{{- define "relaygr.prefixes" -}}
{{- $settings := .Values.settings -}}
{{- $topics := $settings.topic_prefix | default "relaygr" -}}
{{- $groups := $settings.group_prefix | default "relaygr" -}}
{{- $histories := $settings.history_prefix | default $topics -}}
{{- with $settings.scenario -}}
{{- $parts := splitList "/" . -}}
{{- $scenario := get ($settings.scenarios | default dict) (first $parts) -}}
{{- if not $scenario }}{{ fail (printf "settings.scenario is %q, which settings.scenarios does not have: add it there, or remove settings.scenario" .) }}{{ end -}}
{{- $own := $scenario.topic_prefix -}}
{{- if gt (len $parts) 1 -}}
{{- if not (hasKey ($scenario.variants | default dict) (last $parts)) }}{{ fail (printf "settings.scenario is %q, but settings.scenarios.%s.variants has no such variant: add it there, or name another" . (first $parts)) }}{{ end -}}
{{- if not $own }}{{ fail (printf "settings.scenarios.%s has variants and no topic_prefix: set its topic_prefix" (first $parts)) }}{{ end -}}
{{- $own = printf "%s-%s" $own (last $parts) -}}
{{- end -}}
{{- if $own }}{{ $topics = $own }}{{ $groups = $own }}{{ end -}}
{{- end -}}
topics: {{ $topics | quote }}
groups: {{ $groups | quote }}
histories: {{ $histories | quote }}
{{- end }}

{{- define "relaygr.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* The settings file. */}}
{{- define "relaygr.settings" -}}
{{ include "relaygr.check" . }}
{{- toYaml .Values.settings }}
{{- end }}

{{/* A hash of the settings that a role reads: another role's settings do not restart it. */}}
{{- define "relaygr.checksum" -}}
{{- $reads := get (dict "worker" (list "worker" "supervisor" "consumer" "admission") "pre-infer" (list "worker" "consumer" "admission") "trigger" (list "trigger" "admission") "lag" (list "lag") "gateway" (list "gateway" "client") "ui" (list "ui")) .role -}}
{{- $own := deepCopy .root.Values.settings -}}
{{- range list "worker" "supervisor" "consumer" "admission" "trigger" "lag" "client" "gateway" "traffic" "ui" }}{{ if not (has . $reads) }}{{ $_ := unset $own . }}{{ end }}{{ end -}}
{{- toYaml $own | sha256sum -}}
{{- end }}

{{/* What every pod has: dict "root" "role". */}}
{{- define "relaygr.podBase" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
automountServiceAccountToken: false
# Without variables of the namespace's Services: a process refuses an unknown RELAYGR_ variable.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with .root.Values.user }}
  runAsUser: {{ int64 . }}
  runAsGroup: {{ int64 . }}
  fsGroup: {{ int64 . }}
  {{- end }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
  {{- if and (has .role (list "worker" "pre-infer")) .root.Values.worker.supplementalGroups }}
  supplementalGroups: {{ toJson .root.Values.worker.supplementalGroups }}
  {{- end }}
{{- end }}

{{- define "relaygr.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Secret of a role, or nothing. With strimzi.users it is the one that Strimzi writes. */}}
{{- define "relaygr.secret" -}}
{{- $own := get .root.Values.security.roles .role | default dict -}}
{{- if $own.secret }}{{ $own.secret }}
{{- else if has .role .root.Values.strimzi.users }}{{ printf "%s-%s" (include "relaygr.fullname" .root) .role }}
{{- else }}{{ .root.Values.security.secret }}{{ end -}}
{{- end }}

{{- define "relaygr.username" -}}
{{- $own := get .root.Values.security.roles .role | default dict -}}
{{- if $own.username }}{{ $own.username }}
{{- else if and (has .role .root.Values.strimzi.users) (eq .root.Values.strimzi.authentication "scram-sha-512") }}{{ printf "%s-%s" (include "relaygr.fullname" .root) .role }}{{ end -}}
{{- end }}

{{/* Environment of a role. The image sets the same addresses; another image need not. */}}
{{- define "relaygr.environment" -}}
- {name: HOME, value: /tmp}
{{- if ne .role "topics" }}
{{- $section := eq .role "pre-infer" | ternary "worker" .role | upper }}
- {name: RELAYGR_{{ $section }}__HTTP_HOST, value: "::"}
- {name: RELAYGR_{{ $section }}__HTTP_PORT, value: "8080"}
{{- end }}
{{- if has .role (list "gateway" "ui") }}
- name: RELAYGR_{{ upper .role }}__TOKEN
  valueFrom: {secretKeyRef: {name: {{ (get .root.Values .role).tokenSecret }}, key: token}}
{{- end }}
{{- if and (has .role (list "worker" "pre-infer")) .root.Values.pool.enabled }}
- {name: RELAYGR_WORKER__POOL__STORE, value: "mooncake://{{ include "relaygr.poolAddress" .root }}?protocol={{ .root.Values.pool.protocol }}"}
- {name: RELAYGR_WORKER__POOL__SECRET_FILE, value: /etc/relaygr/pool/secret}
{{- end }}
{{- with include "relaygr.username" . }}
- {name: RELAYGR_SECURITY__SASL_USERNAME, value: {{ . | quote }}}
{{- end }}
{{- with .root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The metrics pages that the live page reads, besides those of workers: JSON. */}}
{{- define "relaygr.scraped" -}}
{{- $pages := dig "ui" "scrape" list .Values.settings -}}
{{- range $role := list "trigger" "gateway" -}}
{{- if has $role (include "relaygr.roles" $ | splitList " ") }}{{ $pages = append $pages (printf "http://%s-%s:8080/metrics" (include "relaygr.fullname" $) $role) }}{{ end -}}
{{- end -}}
{{- toJson $pages -}}
{{- end }}

{{- define "relaygr.mounts" -}}
- {name: settings, mountPath: /etc/relaygr/settings, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if include "relaygr.secret" . }}
- {name: security, mountPath: /etc/relaygr/security, readOnly: true}
{{- end }}
{{- if .root.Values.security.caSecret }}
- {name: ca, mountPath: /etc/relaygr/ca, readOnly: true}
{{- end }}
{{- if and (has .role (list "worker" "pre-infer")) .root.Values.pool.enabled }}
- {name: pool, mountPath: /etc/relaygr/pool, readOnly: true}
{{- end }}
{{- end }}

{{/* dict "root" "role" "configMap". */}}
{{- define "relaygr.volumes" -}}
- name: settings
  configMap: {name: {{ .configMap }}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
{{- with include "relaygr.secret" . }}
- name: security
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .root.Values.security.caSecret }}
- name: ca
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if and (has .role (list "worker" "pre-infer")) .root.Values.pool.enabled }}
- name: pool
  secret: {secretName: {{ .root.Values.pool.secret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* The disruption budget of a role, unless its maxUnavailable is null: dict "root" "role" "own" (its values). */}}
{{- define "relaygr.budget" -}}
{{- if not (kindIs "invalid" .own.maxUnavailable) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "relaygr.fullname" .root }}-{{ .role }}
  labels: {{ include "relaygr.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .own.maxUnavailable }}
  # A pod that is not ready serves nobody, and must not keep its node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{ include "relaygr.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* A Deployment of `relaygr` with probes, its Service and its disruption budget: dict "root" "role" "args" "replicas" (none: KEDA's). */}}
{{- define "relaygr.deployment" -}}
{{- $values := get .root.Values .role -}}
{{- $name := printf "%s-%s" (include "relaygr.fullname" .root) .role -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{ include "relaygr.labels" . | nindent 4 }}
spec:
  clusterIP: None
  # A process that is not ready is scraped too, but callers must not find a gateway that stops.
  publishNotReadyAddresses: {{ ne .role "gateway" }}
  ports:
    - {name: http, port: 8080, targetPort: http}
    {{- if eq .role "gateway" }}
    - {name: api, port: 8088, targetPort: api}
    {{- end }}
  selector: {{ include "relaygr.selector" . | nindent 4 }}
{{- include "relaygr.budget" (dict "root" .root "role" .role "own" $values) }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{ include "relaygr.labels" . | nindent 4 }}
spec:
  {{- if hasKey . "replicas" }}
  replicas: {{ .replicas }}
  {{- end }}
  selector:
    matchLabels: {{ include "relaygr.selector" . | nindent 6 }}
  template:
    metadata:
      # Without the chart's version, so that a new chart alone restarts nothing.
      labels: {{ include "relaygr.selector" . | nindent 8 }}
      annotations:
        checksum/settings: {{ include "relaygr.checksum" . }}
        {{- with $values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      {{- include "relaygr.podBase" . | trim | nindent 6 }}
      {{- if eq .role "gateway" }}
      {{- $own := .root.Values.settings.gateway }}
      terminationGracePeriodSeconds: {{ addf ($own.stop_delay_s | default 0) ($own.drain_s | default 5) 25 | ceil | int }}
      {{- end }}
      containers:
        - name: {{ .role }}
          {{- include "relaygr.image" .root | nindent 10 }}
          args: {{ toJson (concat .args (list "--config" "/etc/relaygr/settings/relaygr.yaml")) }}
          env:
            {{- include "relaygr.environment" . | nindent 12 }}
            {{- with get (dict "trigger" "TRIGGER__INSTANCE_ID" "gateway" "GATEWAY__GATEWAY_ID") .role }}
            - name: RELAYGR_{{ . }}
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            {{- end }}
            {{- if eq .role "gateway" }}
            - {name: RELAYGR_GATEWAY__LISTEN_HOST, value: "::"}
            - {name: RELAYGR_GATEWAY__LISTEN_PORT, value: "8088"}
            {{- else if eq .role "ui" }}
            # A Service's name leads to each of its processes. Workers name their pages in their statuses.
            - name: RELAYGR_UI__SCRAPE
              value: {{ include "relaygr.scraped" .root | quote }}
            {{- end }}
          ports:
            - {name: http, containerPort: 8080}
            {{- if eq .role "gateway" }}
            - {name: api, containerPort: 8088}
            {{- end }}
          startupProbe:
            httpGet: {path: /healthz, port: http}
            periodSeconds: 5
            timeoutSeconds: 4
            failureThreshold: 24
          livenessProbe:
            httpGet: {path: /healthz, port: http}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 3
          readinessProbe:
            httpGet: {path: /readyz, port: http}
            periodSeconds: 5
            timeoutSeconds: 4
          resources: {{ toYaml $values.resources | nindent 12 }}
          {{- include "relaygr.containerSecurity" . | nindent 10 }}
          volumeMounts: {{ include "relaygr.mounts" . | nindent 12 }}
      volumes: {{ include "relaygr.volumes" (merge (dict "configMap" (include "relaygr.fullname" .root)) .) | nindent 8 }}
      {{- include "relaygr.placement" $values | nindent 6 }}
{{- end }}

{{/* The master's HOST:PORT. */}}
{{- define "relaygr.poolAddress" -}}
{{ include "relaygr.fullname" . }}-pool-master:50051
{{- end }}

{{/* What the containers of master and holders share. */}}
{{- define "relaygr.poolContainer" -}}
readinessProbe:
  tcpSocket: {port: rpc}
  periodSeconds: 5
{{ include "relaygr.containerSecurity" . }}
volumeMounts: [{name: tmp, mountPath: /tmp}]
{{- end }}

{{/* Ports of the cluster's name service. A policy sees those of its pods, which are 5353 in OpenShift. */}}
{{- define "relaygr.nameServicePorts" -}}
[{protocol: UDP, port: 53}, {protocol: TCP, port: 53}, {protocol: UDP, port: 5353}, {protocol: TCP, port: 5353}]
{{- end }}

{{/* A selector of the pods of some roles, or of all others: JSON. dict "root" "roles" "operator" (In, or NotIn). */}}
{{- define "relaygr.pods" -}}
{{- $labels := dict "app.kubernetes.io/name" "relaygr" "app.kubernetes.io/instance" .root.Release.Name -}}
{{- $roles := dict "key" "app.kubernetes.io/component" "operator" (.operator | default "In") "values" .roles -}}
{{- dict "matchLabels" $labels "matchExpressions" (list $roles) | toJson -}}
{{- end }}

{{- define "relaygr.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $key }}
{{ $key }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* A claim of each worker: dict "root" "role" "name" "class" "size". */}}
{{- define "relaygr.claim" -}}
- metadata:
    name: {{ .name }}
    labels: {{ include "relaygr.selector" . | nindent 6 }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .class }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .size }}
{{- end }}
