// A gateway in Go: one impression of one user.
// Check your port with the test vectors (relaygr/schemas/vectors/wire.json).
//
//	go mod init gateway && go get github.com/confluentinc/confluent-kafka-go/v2/kafka github.com/vmihailenco/msgpack/v5
//	go run gateway.go --prefix relaygr --budget-ms 1000 127.0.0.1:9092 ann 101 102 103
package main

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
	"github.com/vmihailenco/msgpack/v5"
)

const gatewayID = "go-gateway"

type behaviours struct {
	Items        []byte `msgpack:"items"`
	Actions      []byte `msgpack:"actions"`
	TimestampsMs []byte `msgpack:"timestamps_ms"`
}

type retrievalEvent struct {
	RequestID           string `msgpack:"request_id"`
	UserID              string `msgpack:"user_id"`
	RetrievalAtUs       int64  `msgpack:"retrieval_at_us"`
	ExpectedRankingAtUs int64  `msgpack:"expected_ranking_at_us"`
	RankingBudgetMs     int64  `msgpack:"ranking_budget_ms"`
	ExpectedCandidates  int64  `msgpack:"expected_candidates"`
	ExpectedSuffix      int64  `msgpack:"expected_suffix"`
}

type rankingRequest struct {
	RequestID   string     `msgpack:"request_id"`
	UserID      string     `msgpack:"user_id"`
	SentAtUs    int64      `msgpack:"sent_at_us"`
	DeadlineUs  int64      `msgpack:"deadline_us"`
	QueryTimeMs int64      `msgpack:"query_time_ms"`
	Candidates  []byte     `msgpack:"candidates"`
	Suffix      behaviours `msgpack:"suffix"`
}

type rankingResult struct {
	Outcome  string `msgpack:"outcome"`
	Reason   string `msgpack:"reason"`
	Path     string `msgpack:"path"`
	NumTasks int    `msgpack:"num_tasks"`
	Scores   []byte `msgpack:"scores"`
}

func main() {
	prefix := flag.String("prefix", "relaygr", "topic prefix")
	budgetMs := flag.Int64("budget-ms", 1000, "deadline of the ranking request")
	flag.Parse()
	if flag.NArg() < 3 {
		fmt.Fprintln(os.Stderr, "usage: gateway [--prefix PREFIX] [--budget-ms MS] BOOTSTRAP USER CANDIDATE...")
		os.Exit(2)
	}
	retrieval, ranking, results := *prefix+".retrieval", *prefix+".ranking", *prefix+".results"
	servers, user := flag.Arg(0), flag.Arg(1)
	var candidates bytes.Buffer // little-endian 64-bit numbers
	for _, text := range flag.Args()[2:] {
		item, err := strconv.ParseInt(text, 10, 64)
		check(err)
		check(binary.Write(&candidates, binary.LittleEndian, item))
	}

	// Every producer of the relay uses Java's murmur2: librdkafka's default is another hash.
	producer, err := kafka.NewProducer(&kafka.ConfigMap{
		"bootstrap.servers": servers, "partitioner": "murmur2_random", "linger.ms": 0})
	check(err)
	defer producer.Close()
	consumer, err := kafka.NewConsumer(&kafka.ConfigMap{
		"bootstrap.servers": servers, "group.id": "unused", "enable.auto.commit": false, "fetch.wait.max.ms": 5})
	check(err)
	defer consumer.Close()
	// The end is looked up before the request is sent, so that no answer is missed.
	_, end, err := consumer.QueryWatermarkOffsets(results, 0, 10_000)
	check(err)
	check(consumer.Assign([]kafka.TopicPartition{{Topic: &results, Partition: 0, Offset: kafka.Offset(end)}}))

	token := make([]byte, 8) // a result is accepted only by who knows the id
	_, err = rand.Read(token)
	check(err)
	began := time.Now()
	id := fmt.Sprintf("%s.%x.1.%s", gatewayID, began.UnixMilli(), hex.EncodeToString(token))
	send(producer, &retrieval, user, nil, retrievalEvent{id, user, began.UnixMicro(),
		began.UnixMicro() + 150_000, *budgetMs, int64(flag.NArg() - 2), 0})

	// ... retrieval and pre-processing find the candidates; meanwhile the relay computes the user's prefix ...

	sent := time.Now()
	deadline := sent.Add(time.Duration(*budgetMs) * time.Millisecond)
	headers := []kafka.Header{
		{Key: "request_id", Value: []byte(id)},
		{Key: "gateway_id", Value: []byte(gatewayID)},
		{Key: "reply_topic", Value: []byte(results)},
		{Key: "reply_partition", Value: []byte("0")},
		{Key: "deadline_us", Value: []byte(strconv.FormatInt(deadline.UnixMicro(), 10))},
	}
	none := []byte{}
	send(producer, &ranking, user, headers, rankingRequest{id, user, sent.UnixMicro(), deadline.UnixMicro(),
		began.UnixMilli(), candidates.Bytes(), behaviours{none, none, none}})

	for time.Now().Before(deadline) {
		message, err := consumer.ReadMessage(50 * time.Millisecond)
		if err != nil || !answers(message, id) {
			continue // A time-out, or the answer to another gateway on this partition.
		}
		if len(message.Value) < 2 || message.Value[0] != 1 {
			check(fmt.Errorf("another schema version than 1"))
		}
		var result rankingResult
		check(msgpack.Unmarshal(message.Value[1:], &result))
		scores := make([]float32, len(result.Scores)/4) // row-major: num_tasks for each candidate
		check(binary.Read(bytes.NewReader(result.Scores), binary.LittleEndian, scores))
		fmt.Println(result.Outcome, result.Path, result.Reason, scores)
		return
	}
	fmt.Println("timed_out")
}

// send writes the schema version and the body to a topic, keyed by the user.
func send(producer *kafka.Producer, topic *string, user string, headers []kafka.Header, body any) {
	packed, err := msgpack.Marshal(body)
	check(err)
	check(producer.Produce(&kafka.Message{
		TopicPartition: kafka.TopicPartition{Topic: topic, Partition: kafka.PartitionAny},
		Key:            []byte(user),
		Value:          append([]byte{1}, packed...),
		Headers:        headers,
	}, nil))
}

func answers(message *kafka.Message, id string) bool {
	for _, header := range message.Headers {
		if header.Key == "request_id" {
			return string(header.Value) == id
		}
	}
	return false
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
