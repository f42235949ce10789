import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A gateway in Java: one impression of one user. It needs kafka-clients and nothing else, Java 17 or newer:
 *
 *   java -cp "$KAFKA_HOME/libs/*" Gateway.java --prefix relaygr --budget-ms 1000 127.0.0.1:9092 ann 101 102 103
 *
 * The arguments are the bootstrap servers, the user and the candidates; the options may be left out. The program
 * publishes a retrieval event, sends the ranking request with a reply address in its headers, and reads the result from
 * its partition of the results topic. docs/messages.md has all fields. The default partitioner of a Java producer is
 * the murmur2 that the relay needs.
 */
public class Gateway {
    static final byte SCHEMA_VERSION = 1;

    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new LinkedHashMap<>(Map.of("--prefix", "relaygr", "--budget-ms", "1000"));
        List<String> plain = new ArrayList<>(Arrays.asList(arguments));
        while (plain.size() > 1 && options.containsKey(plain.get(0))) {
            options.put(plain.remove(0), plain.remove(0));
        }
        if (plain.size() < 3) {
            System.err.println("usage: Gateway [--prefix PREFIX] [--budget-ms MS] BOOTSTRAP USER CANDIDATE...");
            System.exit(2);
        }
        String prefix = options.get("--prefix"), user = plain.get(1), gatewayId = "java-gateway";
        long budgetMs = Long.parseLong(options.get("--budget-ms"));
        long[] candidates = plain.stream().skip(2).mapToLong(Long::parseLong).toArray();
        byte[] key = bytes(user);
        TopicPartition reply = new TopicPartition(prefix + ".results", 0);

        Properties common = new Properties();
        common.put("bootstrap.servers", plain.get(0));
        Properties reading = new Properties();
        reading.putAll(common);
        reading.put("fetch.max.wait.ms", "5");
        try (var producer = new KafkaProducer<>(common, new ByteArraySerializer(), new ByteArraySerializer());
                var consumer = new KafkaConsumer<>(reading, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            // assign() without a group. position() looks the end up now, so that no answer is missed.
            consumer.assign(List.of(reply));
            consumer.seekToEnd(List.of(reply));
            consumer.position(reply);

            // The id of the impression. The end is random: a result is accepted only by who knows the id.
            byte[] token = new byte[8];
            new SecureRandom().nextBytes(token);
            long retrievalUs = nowUs();
            String requestId =
                    gatewayId + "." + Long.toHexString(retrievalUs / 1000) + ".1." + HexFormat.of().formatHex(token);
            Map<String, Object> event = new LinkedHashMap<>();
            event.put("request_id", requestId);
            event.put("user_id", user);
            event.put("retrieval_at_us", retrievalUs);
            event.put("expected_ranking_at_us", retrievalUs + 150_000);
            event.put("ranking_budget_ms", budgetMs);
            event.put("expected_candidates", (long) candidates.length);
            event.put("expected_suffix", 0L);
            producer.send(new ProducerRecord<>(prefix + ".retrieval", key, encode(event))).get(10, TimeUnit.SECONDS);

            // ... retrieval and pre-processing find the candidates; meanwhile the relay computes the user's prefix ...

            long sentUs = nowUs(), deadlineUs = sentUs + budgetMs * 1000;
            byte[] none = new byte[0];
            Map<String, Object> request = new LinkedHashMap<>();
            request.put("request_id", requestId);
            request.put("user_id", user);
            request.put("sent_at_us", sentUs);
            request.put("deadline_us", deadlineUs);
            request.put("query_time_ms", retrievalUs / 1000);
            request.put("candidates", packed(candidates));
            request.put("suffix", Map.of("items", none, "actions", none, "timestamps_ms", none));
            var ranking = new ProducerRecord<>(prefix + ".ranking", key, encode(request));
            ranking.headers()
                    .add("request_id", bytes(requestId))
                    .add("gateway_id", bytes(gatewayId))
                    .add("reply_topic", bytes(reply.topic()))
                    .add("reply_partition", bytes("0"))
                    .add("deadline_us", bytes(Long.toString(deadlineUs)));
            producer.send(ranking);

            while (nowUs() < deadlineUs) {
                for (ConsumerRecord<byte[], byte[]> each : consumer.poll(Duration.ofMillis(50))) {
                    Header id = each.headers().lastHeader("request_id");
                    // Other gateways may share the partition.
                    if (id != null && requestId.equals(new String(id.value(), StandardCharsets.UTF_8))) {
                        System.exit(print(decode(each.value())));
                    }
                }
            }
        }
        System.out.println("timed_out");
        System.exit(1);
    }

    /** Prints the outcome, the path and the scores: float32, row-major, num_tasks for each candidate. */
    static int print(Map<String, Object> result) {
        Object outcome = result.get("outcome");
        StringBuilder line = new StringBuilder(outcome + " " + result.getOrDefault("path", result.get("reason")));
        if (result.get("scores") instanceof byte[] scores) {
            ByteBuffer values = ByteBuffer.wrap(scores).order(ByteOrder.LITTLE_ENDIAN);
            while (values.hasRemaining()) {
                line.append(' ').append(values.getFloat());
            }
        }
        System.out.println(line);
        return "ranked".equals(outcome) ? 0 : 1;
    }

    static long nowUs() {
        return System.currentTimeMillis() * 1000;
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    /** An array: little-endian 64-bit numbers. */
    static byte[] packed(long[] numbers) {
        ByteBuffer buffer = ByteBuffer.allocate(8 * numbers.length).order(ByteOrder.LITTLE_ENDIAN);
        Arrays.stream(numbers).forEach(buffer::putLong);
        return buffer.array();
    }

    // -- MessagePack: the part of it that the messages use; a library such as msgpack-java has all of it --------------

    /** A message: one byte with the schema version, then a MessagePack map. */
    static byte[] encode(Map<String, ?> body) throws IOException {
        ByteArrayOutputStream message = new ByteArrayOutputStream();
        message.write(SCHEMA_VERSION);
        write(new DataOutputStream(message), body);
        return message.toByteArray();
    }

    static void write(DataOutputStream out, Object value) throws IOException {
        if (value instanceof Map<?, ?> map) {
            out.writeByte(0xde);
            out.writeShort(map.size());
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                write(out, entry.getKey());
                write(out, entry.getValue());
            }
        } else if (value instanceof Long number) {
            out.writeByte(0xd3);
            out.writeLong(number);
        } else if (value instanceof String text) {
            byte[] data = bytes(text);
            out.writeByte(0xda);
            out.writeShort(data.length);
            out.write(data);
        } else if (value instanceof byte[] data) {
            out.writeByte(0xc6);
            out.writeInt(data.length);
            out.write(data);
        } else {
            throw new IllegalArgumentException("no MessagePack form of " + value);
        }
    }

    @SuppressWarnings("unchecked")
    static Map<String, Object> decode(byte[] message) {
        if (message[0] != SCHEMA_VERSION) {
            throw new IllegalArgumentException("schema version " + message[0] + ": this gateway knows version 1");
        }
        return (Map<String, Object>) read(ByteBuffer.wrap(message, 1, message.length - 1));
    }

    static Object read(ByteBuffer in) {
        int code = in.get() & 0xff;
        if (code < 0x80) return (long) code;
        if (code < 0x90) return readMap(in, code & 0x0f);
        if (code < 0xa0) return readList(in, code & 0x0f);
        if (code < 0xc0) return text(in, code & 0x1f);
        if (code >= 0xe0) return (long) (byte) code;
        return switch (code) {
            case 0xc0 -> null;
            case 0xc2 -> false;
            case 0xc3 -> true;
            case 0xc4 -> raw(in, in.get() & 0xff);
            case 0xc5 -> raw(in, in.getShort() & 0xffff);
            case 0xc6 -> raw(in, in.getInt());
            case 0xca -> (double) in.getFloat();
            case 0xcb -> in.getDouble();
            case 0xcc -> (long) (in.get() & 0xff);
            case 0xcd -> (long) (in.getShort() & 0xffff);
            case 0xce -> in.getInt() & 0xffffffffL;
            case 0xcf, 0xd3 -> in.getLong();
            case 0xd0 -> (long) in.get();
            case 0xd1 -> (long) in.getShort();
            case 0xd2 -> (long) in.getInt();
            case 0xd9 -> text(in, in.get() & 0xff);
            case 0xda -> text(in, in.getShort() & 0xffff);
            case 0xdc -> readList(in, in.getShort() & 0xffff);
            case 0xde -> readMap(in, in.getShort() & 0xffff);
            default -> throw new IllegalArgumentException("MessagePack code " + code + " is not used in messages");
        };
    }

    static Map<String, Object> readMap(ByteBuffer in, int size) {
        Map<String, Object> map = new LinkedHashMap<>();
        for (int entry = 0; entry < size; entry++) {
            String name = (String) read(in);
            map.put(name, read(in));
        }
        return map;
    }

    static List<Object> readList(ByteBuffer in, int size) {
        List<Object> list = new ArrayList<>();
        for (int entry = 0; entry < size; entry++) {
            list.add(read(in));
        }
        return list;
    }

    static byte[] raw(ByteBuffer in, int size) {
        if (size < 0 || size > in.remaining()) {
            throw new IllegalArgumentException(size + " bytes are claimed, " + in.remaining() + " are left");
        }
        byte[] data = new byte[size];
        in.get(data);
        return data;
    }

    static String text(ByteBuffer in, int size) {
        return new String(raw(in, size), StandardCharsets.UTF_8);
    }
}
